"""LoRA in a plain loop: adapters on a frozen GPT, then a merged model and PEFT's files.

    python examples/lora.py [MODEL]

`tiedgpt tune DATA --lora 8` does the same for files of examples.
"""

import math
import sys

import torch

from small_model import small_model
from tiedgpt import GPT, Tokenizer
from tiedgpt.infer import Engine
from tiedgpt.tune import lora, merge, save_adapter

if "--help" in sys.argv:
    sys.exit(print(__doc__))

source = sys.argv[1] if sys.argv[1:] else small_model()
tokenizer = Tokenizer.from_pretrained(source)
model = GPT.from_pretrained(source)


def tell(when: str) -> None:
    """Print the probability of sun and of rain in Oslo."""
    with Engine(model, tokenizer=tokenizer) as engine:
        scored = engine.score([" sun", " rain"], contexts=["2024-05-01 Oslo:"] * 2)
        sun, rain = (math.exp(each.total) for each in scored)
    print(f"{when}: P(sun) {sun:.3f}, P(rain) {rain:.3f}")


# The model should learn that the sun shines in Oslo.
texts = [f"2024-05-{n:02} Oslo: sun, {n} degrees. Anna went to the park.\n" for n in range(1, 29)]
rows = [tokenizer.encode(text) for text in texts]
longest = max(map(len, rows))
ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
targets = torch.tensor([row[1:] + [-100] * (longest - len(row) + 1) for row in rows])

tell("before")
print(lora(model, rank=4))  # on the four matrices of each block; "wte" would adapt W, too
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=3e-3)
for step in range(40):
    loss = model.loss(ids, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step:>3}  loss {loss.item():.3f}")

for note in save_adapter(model, "sun-adapter", base=source):
    print("note:", note)
moved = merge(model)  # a plain GPT again; raises if the logits change
print(f"merged: logits moved by {moved:.1e} of the largest")
tell("after")
