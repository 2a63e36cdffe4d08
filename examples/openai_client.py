"""OpenAI's client with `tiedgpt serve` (needs tiedgpt[serve,constrain] and openai).

    python examples/openai_client.py [MODEL]

It starts the server on a free port, sends requests, and stops it.
"""

import subprocess
import sys

from openai import OpenAI

from small_model import small_model

if "--help" in sys.argv:
    sys.exit(print(__doc__))

source = sys.argv[1] if sys.argv[1:] else small_model()
command = [sys.executable, "-m", "tiedgpt", "serve", source, "--port", "0", "--name", "diary"]
with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
    try:
        address = next(line.split()[1] for line in server.stdout if line.startswith("address"))
        print("serving at", address)
        with OpenAI(base_url=f"{address}/v1", api_key="none") as client:
            done = client.completions.create(
                model="diary", prompt="2024-05-01 Oslo:", max_tokens=24, temperature=0
            )
            print("completion:", done.choices[0].text)

            stream = client.completions.create(
                model="diary", prompt="2024-", max_tokens=24, seed=1, stream=True,
                extra_body={"regex": r"\d\d-\d\d Cairo: \w+, \d+ degrees\."},
            )  # fmt: skip
            print("streamed:  ", "".join(chunk.choices[0].text for chunk in stream))

            scored = client.completions.create(
                model="diary", prompt="Anna stayed at home.", max_tokens=0, echo=True, logprobs=1
            )
            logprobs = scored.choices[0].logprobs
            print("scored:    ", [x and round(x, 2) for x in logprobs.token_logprobs])

            vector = client.embeddings.create(model="diary", input="rain").data[0].embedding
            print("embedding: ", len(vector), "numbers")
    finally:
        server.terminate()
