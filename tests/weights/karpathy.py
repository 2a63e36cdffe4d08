"""nanoGPT's and minGPT's architectures, written and saved independently of tiedgpt.

Written from what their model files define: parameter names, shapes, buffers, what is tied, which
GELU. Nothing of tiedgpt is used.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ARGS = {
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 32,
    "block_size": 16,
    "bias": False,
    "vocab_size": 67,
    "dropout": 0.2,
}


class Norm(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, correction=0, keepdim=True)
        y = (x - mean) / torch.sqrt(variance + 1e-5) * self.weight
        return y if self.bias is None else y + self.bias


def attend(q: Tensor, k: Tensor, v: Tensor, n_head: int) -> Tensor:
    """Causal attention over (B, T, D), one head after the other, with an explicit mask."""
    length, size = q.shape[1], q.shape[2] // n_head
    future = torch.ones(length, length).triu(1).bool()
    heads = []
    for h in range(n_head):
        columns = slice(h * size, (h + 1) * size)
        scores = q[..., columns] @ k[..., columns].transpose(1, 2) / size**0.5
        heads.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ v[..., columns])
    return torch.cat(heads, -1)


class Block(nn.Module):
    def __init__(self, args: dict, masks: bool, approximate: str) -> None:
        super().__init__()
        width, bias, length = args["n_embd"], args["bias"], args["block_size"]
        self.n_head, self.approximate = args["n_head"], approximate
        self.ln_1, self.ln_2 = Norm(width, bias), Norm(width, bias)
        self.attn = nn.Module()
        self.attn.c_attn = nn.Linear(width, 3 * width, bias=bias)
        self.attn.c_proj = nn.Linear(width, width, bias=bias)
        if masks:
            self.attn.register_buffer("bias", torch.ones(length, length).tril()[None, None])
        self.mlp = nn.Module()
        self.mlp.c_fc = nn.Linear(width, 4 * width, bias=bias)
        self.mlp.c_proj = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attn.c_attn(self.ln_1(x)).chunk(3, -1)
        x = x + self.attn.c_proj(attend(q, k, v, self.n_head))
        hidden = F.gelu(self.mlp.c_fc(self.ln_2(x)), approximate=self.approximate)
        return x + self.mlp.c_proj(hidden)


class Karpathy(nn.Module):
    """nanoGPT when tied, with the exact GELU; minGPT when not, with the tanh form and masks."""

    def __init__(self, args: dict, *, masks=False, tied=True, approximate="none") -> None:
        super().__init__()
        width = args["n_embd"]
        blocks = nn.ModuleList(Block(args, masks, approximate) for _ in range(args["n_layer"]))
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(args["vocab_size"], width),
            "wpe": nn.Embedding(args["block_size"], width),
            "h": blocks,
            "ln_f": Norm(width, args["bias"]),
        })  # fmt: skip
        self.lm_head = nn.Linear(width, args["vocab_size"], bias=False)
        if tied:
            self.transformer["wte"].weight = self.lm_head.weight
        loud(self)

    def forward(self, ids: Tensor) -> Tensor:
        parts = self.transformer
        x = parts["wte"](ids) + parts["wpe"].weight[: ids.shape[1]]
        for block in parts["h"]:
            x = block(x)
        return self.lm_head(parts["ln_f"](x))


@torch.no_grad()
def loud(model: nn.Module) -> None:
    """Draw weights so large that a mistake shows."""
    for name, parameter in model.named_parameters():
        norm = parameter.ndim == 1 and name.endswith("weight")
        parameter.normal_(1.0 if norm else 0.0, 0.2)


def save_nanogpt(
    path: Path, model: Karpathy, args: dict, *, prefix: str = "", legacy: bool = False
) -> Path:
    """Save as nanoGPT's train.py does: after a step of AdamW, with a loss that is a tensor."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    loss = model(torch.zeros(1, 4, dtype=torch.int64)).square().mean()
    loss.backward()
    optimizer.step()
    checkpoint = {
        "model": {prefix + name: tensor for name, tensor in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "model_args": args,
        "iter_num": 5,
        "best_val_loss": loss.detach(),
        "config": {
            "out_dir": "out",
            "dataset": "shakespeare_char",
            "min_lr": 1e-4,
            "compile": True,
        },
    }
    torch.save(checkpoint, path, _use_new_zipfile_serialization=not legacy)
    return path


def some_ids(args: dict) -> Tensor:
    """Tokens (2, T) for a model of these sizes."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(args["vocab_size"], (2, args["block_size"]), generator=generator)
