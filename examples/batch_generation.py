"""Many prompts at once, with constrained texts, as lines of JSON (needs tiedgpt[constrain]).

    python examples/batch_generation.py [MODEL]

A prefix that several prompts share is computed once.
"""

import json
import sys

from small_model import small_model
from tiedgpt.infer import Engine

if "--help" in sys.argv:
    sys.exit(print(__doc__))

ENTRY = r"20\d\d-\d\d-\d\d (Oslo|Cairo|Quito|Perth): (rain|sun|fog|wind), \d{1,2} degrees\."
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Cairo", "Quito", "Perth"]},
        "degrees": {"type": "integer", "minimum": 0, "maximum": 30},
    },
    "required": ["city", "degrees"],
    "additionalProperties": False,
}

source = sys.argv[1] if sys.argv[1:] else small_model()
with Engine(source, slots=4) as engine:
    prompts = ["", "2024-05-01 Oslo: rain, 4 degrees. Anna stayed at home.\n"] * 3
    for done in engine.generate(prompts, regex=ENTRY, max_new_tokens=48, seed=1):
        print(json.dumps({"text": done.text, "ended": done.finish_reason}))
    record = engine.generate("", json_schema=SCHEMA, max_new_tokens=60, temperature=0, timeout=30)
    print(json.dumps({"text": record.text, "ended": record.finish_reason}))
    stats = engine.stats()
    print(f"{stats['generated_tokens']:.0f} tokens, {stats['reused_tokens']:.0f} read from a slot")
