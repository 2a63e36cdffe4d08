"""A model over HTTP: OpenAI's API on an engine.

    import uvicorn
    from tiedgpt import Engine
    from tiedgpt.serve.app import create_app

    with Engine("runs/my-1") as engine:
        uvicorn.run(create_app(engine, name="my-1"))  # what `tiedgpt serve runs/my-1` does

Its modules:

    app.py          the application: its routes, and what they share
    schemas.py      the requests, every field with its limits
    errors.py       errors in OpenAI's form
    streams.py      the texts that the engine generates for one HTTP request
    completions.py  /v1/completions and /v1/chat/completions
    logprobs.py     log-probabilities in OpenAI's forms
    torch_model.py  what torch computes: /v1/embeddings and /inspect/NAME
    page_data.py    what the page shows: inspections, the model, its tokens
    assets.py       the page's files, in page/, and all of them in one file
    page_model.py   a model as the page's own JavaScript, page/model/, reads it
    export.py       the page with a model inside, as one file
    guards.py       checks of each request: host, key, size, time; the access log
    metrics.py      /metrics
    server.py       the socket, deadlines, the end by SIGTERM

The packages are those of the extra `tiedgpt[serve]`.
"""
