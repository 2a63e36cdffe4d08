"""A training loop of your own: plain PyTorch, with a GPT in the middle.

    python examples/own_loop.py [TEXT] [STEPS] [UNTIE_AT]

Without a text, it trains on the made-up diary of `small_model.py`. With UNTIE_AT, the model is
untied after that many steps: the head begins as a copy of W, and W only reads from then on.
"""

import sys
from pathlib import Path

import torch

from small_model import diary
from tiedgpt import GPT, GPTConfig, Tokenizer
from tiedgpt.infer import Engine
from tiedgpt.tie import untie
from tiedgpt.train import fast_training

if "--help" in sys.argv:
    sys.exit(print(__doc__))

text = Path(sys.argv[1]).read_text() if sys.argv[1:] else diary(2000)
steps = int(sys.argv[2]) if sys.argv[2:] else 200
untie_at = int(sys.argv[3]) if sys.argv[3:] else None

tokenizer = Tokenizer.train([text], vocab_size=400)
ids = torch.tensor(tokenizer.encode(text))
train, held_out = ids[: int(0.9 * len(ids))], ids[int(0.9 * len(ids)) :]

torch.manual_seed(0)
config = GPTConfig(
    vocab_size=len(tokenizer), n_positions=64, n_embd=64, n_layer=2, n_head=2,
    embd_pdrop=0, attn_pdrop=0, resid_pdrop=0, eos_token_id=tokenizer.eos_token_id,
)  # fmt: skip
model = GPT(config)
print(model)  # shows the parameter count, and that wte reads and predicts
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


def batch(tokens: torch.Tensor, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw random windows: inputs (B, T), and targets (B, T), the tokens that follow."""
    starts = torch.randint(len(tokens) - 64, (size, 1))
    rows = tokens[starts + torch.arange(65)]
    return rows[:, :-1], rows[:, 1:]


for step in range(steps):
    if step == untie_at:
        print(untie(model))
        optimizer.add_param_group({"params": [model.head.weight]})
        moments = optimizer.state[model.wte.weight]  # the head goes on with a copy of W's
        optimizer.state[model.head.weight] = {name: x.clone() for name, x in moments.items()}
    inputs, targets = batch(train)
    with fast_training(model):  # optional: same loss and gradients, faster
        loss = model.loss(inputs, targets)
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % max(1, steps // 5) == 0:
        print(f"step {step:>4}  loss {loss.item():.3f}")

model.eval()
with torch.no_grad():
    print(f"held out   loss {model.loss(*batch(held_out, 64)).item():.3f}")
model.save_pretrained("own-loop")  # transformers loads it directly
tokenizer.save_pretrained("own-loop")
with Engine("own-loop") as engine:
    print(engine.generate("2024-", max_new_tokens=40, temperature=0).text)
