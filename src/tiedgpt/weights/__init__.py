"""Checkpoints: one table of names and layouts, the native store, one small file a format."""
