"""The rows that were read are added to the gradient of predicting."""

from tiedgpt.train import fast_training


def test_no_second_matrix_is_made(tiny, ids):
    """The one gradient arrives once, with both uses in it."""
    arrived = []
    tiny.wte.weight.register_hook(lambda gradient: arrived.append(gradient.data_ptr()))
    with fast_training(tiny):
        tiny.loss(ids, ids.roll(-1, 1)).backward()
    assert arrived == [tiny.wte.weight.grad.data_ptr()]
    assert not tiny.wte.weight.grad.is_sparse
