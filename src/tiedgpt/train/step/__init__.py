"""A training step: the loss, the optimizers, the blocks, and the state that steps leave."""
