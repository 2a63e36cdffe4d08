"""Training: `train` for a whole run, `Trainer` for its loop, and a state that survives.

    from tiedgpt.train import TrainOptions, train

    options = TrainOptions(data=("my.txt",), size="small", steps=500)
    for event in train(options, out="runs/my-1"):  # what `tiedgpt train` shows
        print(event)
    with fast_training(model):  # a loop of your own: same loss and gradients, faster
        model.loss(ids[:, :-1], ids[:, 1:]).backward()

The names are imported when they are first used.
"""

from tiedgpt.names import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
