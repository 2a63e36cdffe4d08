"""Checkpoints of the GPT family: opened, loaded, saved and converted; one module per format."""
