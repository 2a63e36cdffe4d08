"""File formats: bytes on disk <-> named tensors, one file each; none knows what a GPT is."""
