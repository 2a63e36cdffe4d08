"""How well a model predicts: perplexity, bits per byte, multiple choice and cloze."""
