"""A model over HTTP: OpenAI's API on an engine.

    import uvicorn
    from tiedgpt import Engine
    from tiedgpt.serve.app import create_app

    with Engine("runs/my-1") as engine:
        uvicorn.run(create_app(engine, name="my-1"))  # what `tiedgpt serve runs/my-1` does

The packages are those of the extra `tiedgpt[serve]`.
"""
