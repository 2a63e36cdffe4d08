"""A run on disk: its directory, its record, checkpoints, metrics and the model card."""
