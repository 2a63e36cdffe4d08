"""Score a text: perplexity, the surprisal of each token, and a choice between endings.

    python examples/score_texts.py [MODEL]

`tiedgpt eval MODEL DATA` does this for files.
"""

import math
import sys

from small_model import small_model
from tiedgpt.evaluate.texts import score_text
from tiedgpt.infer import Engine

if "--help" in sys.argv:
    sys.exit(print(__doc__))

source = sys.argv[1] if sys.argv[1:] else small_model()
with Engine(source) as engine:
    text = "2024-05-01 Oslo: rain, 4 degrees. Anna stayed at home.\n"
    score = score_text(engine, text)
    print(f"perplexity {score.perplexity:.2f}, {score.bits_per_byte:.2f} bits per byte\n")

    scored = engine.score(text)
    for id, logprob, rank in zip(scored.ids[1:], scored.logprobs, scored.ranks, strict=True):
        piece = engine.tokenizer.decode([id])
        print(f"{piece!r:>14}  {-logprob / math.log(2):6.2f} bits  rank {rank}")

    context = "2024-05-01 Cairo: sun, 28 degrees. Ben"
    endings = [" went to the park.", " stayed at home.", " flew a kite."]
    print(f"\n{context} ...")
    found = engine.score(endings, contexts=[context] * len(endings))
    for ending, each in sorted(zip(endings, found, strict=True), key=lambda pair: -pair[1].total):
        print(f"{each.total:8.2f} nats {ending}")
