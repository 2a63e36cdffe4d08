"""How well a model predicts: nats a token, perplexity, bits per byte."""
