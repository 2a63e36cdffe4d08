"""A model over HTTP: OpenAI's API on an engine, with prompt log-probabilities that are right.

    app.py          the application: its routes, what they share, errors
    schemas.py      the requests, every field with its limits
    texts.py        texts that the engine writes for one HTTP request, and their cancellation
    completions.py  /v1/completions and /v1/chat/completions
    logprobs.py     log-probabilities in OpenAI's forms
    tensors.py      what torch computes: /v1/embeddings and /inspect/...
    answers.py      what the page asks for: `inspect`, the model, its tokens
    assets.py       the page's files, in page/, and all of them in one file
    export.py       the answers of all views for one text, for `inspect --html`
    guards.py       what a request must pass first: host, key, size, time; the access log
    metrics.py      /metrics
    server.py       the socket, deadlines for headers, the end by SIGTERM

The packages are those of the extra `tiedgpt[serve]`.
"""
