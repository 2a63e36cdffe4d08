"""Training on one device: the plan, the loop, and a state that survives."""
