"""What makes a training step cheaper, switched on from outside for as long as a block lasts.

    with fast_training(model):
        model.loss(ids, targets).backward()

While the block lasts, layers of the model's blocks have another class, which computes the same in
a cheaper way (see `mode.py`); afterwards, and in copies, the model is plain. Each way is one file,
with its measured gain. It gives the plain value and the plain gradient, or steps aside. Deleting a
file and its line in `mode.py` leaves everything working, only slower.

Tried without gain: W's gradient from reading in sparse layout (autograd adds it in place into the
dense one of the head, but the step took 5 % longer), and computing GELU again in the backward pass
(140 MB less for GPT-2 124M at 4 x 512, and 10 % more time).
"""

from tiedgpt.train.fast.mode import fast_training

__all__ = ["fast_training"]
