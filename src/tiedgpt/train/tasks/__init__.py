"""Tasks: their data from files to rows, their loss and score, and their published models."""
