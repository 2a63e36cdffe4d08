"""Checkpoint formats: one file, or one folder, for each."""
