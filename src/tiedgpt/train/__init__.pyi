from tiedgpt.train.loop import Trainer as Trainer
from tiedgpt.train.plan.options import TrainOptions as TrainOptions
from tiedgpt.train.plan.options import TuneOptions as TuneOptions
from tiedgpt.train.run import train as train
from tiedgpt.train.step.fast import fast_training as fast_training
