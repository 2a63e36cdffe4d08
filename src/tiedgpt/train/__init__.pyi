from tiedgpt.train.fast import fast_training as fast_training
from tiedgpt.train.loop import Trainer as Trainer
from tiedgpt.train.options import TrainOptions as TrainOptions
from tiedgpt.train.run import train as train
