"""llm.c's checkpoints: the tensors bear our names already, the header's sizes get GPTConfig's.

llm.c runs GPT-2's architecture and nothing else: the tanh GELU, LayerNorms with 1e-5, biases
everywhere, one matrix that reads and predicts.
"""

from __future__ import annotations

from tiedgpt.weights.checkpoint import Checkpoint, GPTCheckpoint, LazyTensor

FIELDS = {
    "max_seq_len": "n_positions",
    "vocab_size": "vocab_size",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "channels": "n_embd",
}
"""The header's names -> ours."""
ALWAYS = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "norm": "pre",
    "bias": True,
    "tie_word_embeddings": True,
}


def as_gpt(checkpoint: Checkpoint) -> GPTCheckpoint:
    """Return the GPT in a checkpoint of llm.c."""
    told = {ours: checkpoint.config[theirs] for theirs, ours in FIELDS.items()}
    tensors = {name: LazyTensor(tensor) for name, tensor in checkpoint.tensors.items()}
    return GPTCheckpoint("llm.c", ALWAYS | told, tensors)
