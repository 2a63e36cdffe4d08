"""The network itself: torch only; knows no files, no text, no training."""
