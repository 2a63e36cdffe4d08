"""What makes a training step cheaper, switched on from outside for as long as a block lasts.

    with fast_training(model):
        model.loss(ids, targets).backward()

The model stays as it is: `print(model)`, its state dict and its hooks are those of plain modules.
Inside the block some of torch's functions are computed in another way where that is cheaper (see
`mode.py`). Each way is one file, with its measured gain. It gives the plain value and the plain
gradient, or steps aside. Deleting a file and its line in `mode.py` leaves everything working, only
slower.
"""

from tiedgpt.train.fast.mode import fast_training

__all__ = ["fast_training"]
