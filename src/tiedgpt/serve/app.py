"""The application: an engine behind OpenAI's API, and each inspection at /inspect/NAME."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import os
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

import tiedgpt
from tiedgpt.errors import UserError
from tiedgpt.infer import Engine
from tiedgpt.inspect.registry import INSPECTIONS, Inspection
from tiedgpt.serve import completions, page_data, responses, torch_model
from tiedgpt.serve.assets import HEADERS, etag, media_type, page_files
from tiedgpt.serve.completions import Service
from tiedgpt.serve.errors import APIError, add_error_handlers
from tiedgpt.serve.guards import Hosts, Limits, RequestGuard
from tiedgpt.serve.logprobs import TokenNames
from tiedgpt.serve.metrics import Metrics
from tiedgpt.serve.responses import ResponsesRequest
from tiedgpt.serve.schemas import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TextBody,
    TokenizeRequest,
    inspection_body,
)
from tiedgpt.serve.torch_model import TorchModel
from tiedgpt.weights.source import Source, tokenizer_for

if TYPE_CHECKING:
    from tiedgpt.core.model import GPT
    from tiedgpt.data.templates import Template


def create_app(
    engine: Engine,
    *,
    name: str = "tiedgpt",
    key: str | None = None,
    limits: Limits | None = None,
    hosts: Hosts | None = None,
    load: Callable[[], GPT] | None = None,
    source: str | os.PathLike[str] | None = None,
    template: Template | None = None,
    beside: str | os.PathLike[str] | None = None,
) -> FastAPI:
    """Return the ASGI application: an engine, whose queue must hold `limits.queue`, and the page.

    `name` is the model's for clients. With a `key` all but /health and the page's files need it.
    `hosts` are the names by which clients may call it, by default those of this machine alone.
    `load` opens the model for embeddings and inspection, by default a copy of the engine's own.
    `source` is where it lies, so that the page can name its file and show its run; only clients on
    this machine are told the path. `template` writes conversations; without it there is no chat.
    `beside` is where another model lies, which the page compares with this one.
    """
    limits, hosts = limits or Limits(), hosts or Hosts.of("127.0.0.1")
    name = name.encode(errors="replace").decode()  # a directory's may be no UTF-8
    # With one seed, a text depends on the model's shape, the precision and this version.
    fingerprint = hashlib.sha256(f"{engine!r}{tiedgpt.__version__}".encode()).hexdigest()
    service = Service(
        engine,
        name,
        Metrics(engine, name),
        min(128, engine.n_slots + limits.queue),
        f"fp_{fingerprint[:12]}",
        template,
    )
    app = FastAPI(
        title="tiedgpt",
        version=tiedgpt.__version__,
        docs_url=None,
        redoc_url=None,
        responses={"default": {"description": "An error, in the form of OpenAI's"}},
    )
    app.state.ready = True
    app.add_middleware(
        RequestGuard,
        limits=limits,
        hosts=hosts,
        key=key,
        count=lambda status: service.metrics.responses.labels(status).inc(),
    )
    _add_generation(app, service)
    _add_tokens(app, service)
    opened = None if source is None else Source.of(source)
    other = None if beside is None else Source.of(beside)
    model = TorchModel(load or (lambda: _copy_model(engine)), limits.queue, opened)
    _add_torch_model(app, service, model)
    _add_page(app, service, model, opened if hosts.are_local else None, other)
    if other is not None:
        _add_beside(app, other, limits.queue)
    _add_operation(app, service)
    path = "" if hosts.are_local or opened is None else str(opened)
    add_error_handlers(app, {path: name} if os.path.isabs(path) else {})
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def complete(request: Request, body: CompletionRequest) -> Response:
        return await completions.complete(service, request, body)

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatRequest) -> Response:
        return await completions.chat(service, request, body)

    @app.post("/v1/responses")
    async def respond(request: Request, body: ResponsesRequest) -> Response:
        return await responses.respond(service, request, body)

    model = {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "tiedgpt",
        "max_model_len": service.engine.runner.config.n_positions,
    }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        service.require_model(name)
        return model


def _add_tokens(app: FastAPI, service: Service) -> None:
    config = service.engine.runner.config

    def require_tokenizer() -> tiedgpt.Tokenizer:
        if service.engine.tokenizer is None:
            raise UserError("the model has no tokenizer", hint="use token ids")
        return service.engine.tokenizer

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        service.require_model(body.model)
        tokenizer = require_tokenizer()
        if (body.prompt is None) == (body.messages is None):
            raise APIError(400, "give a prompt or messages, and not both", param="prompt")
        if body.messages is not None:
            ids = await completions.encode_messages(
                service,
                body.messages,
                body,
                param="messages",
                add_special_tokens=body.add_special_tokens,
            )
        else:
            ids = await asyncio.to_thread(tokenizer.encode, body.prompt or "")
            ids = ids if body.add_special_tokens is False else [*tokenizer.begin_ids, *ids]
            end = tokenizer.eos_token_id
            if end is not None and (body.prompt or "").encode() == tokenizer.token_bytes(end):
                ids = [end]  # so clients ask for it; within a text it is ordinary text
        texts = list(map(TokenNames(tokenizer).of, ids)) if body.return_token_strs else None
        counts = {"count": len(ids), "max_model_len": config.n_positions}
        return {"tokens": ids, "token_strs": texts, **counts}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        service.require_model(body.model)
        return {"prompt": await asyncio.to_thread(require_tokenizer().decode, body.tokens)}

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        tokenizer = require_tokenizer()
        info: dict[str, Any] = {"bos_token": None, "eos_token": None, **tokenizer.config()}
        info |= {"vocab_size": len(tokenizer), "model_max_length": config.n_positions}
        template = service.template
        text = None if template is None else template.plain_jinja(info["eos_token"] or "")
        return info | {"kind": tokenizer.kind, "chat_template": text}


def _add_torch_model(app: FastAPI, service: Service, model: TorchModel) -> None:
    @app.post("/v1/embeddings")
    async def embed(request: Request, body: EmbeddingRequest) -> dict[str, Any]:
        service.require_model(body.model)
        return await torch_model.embed(service, model, request, body)

    def add(inspection: Inspection) -> None:
        async def inspect(request: Request, body: Body) -> Response:
            data = await torch_model.inspect(service, model, request, inspection, body)
            return Response(data, media_type="application/json")

        inspect.__annotations__["body"] = inspection_body(inspection)
        app.post(f"/inspect/{inspection.name}", name=f"inspect_{inspection.name}")(inspect)

    for inspection in INSPECTIONS.values():
        if inspection.is_served:
            add(inspection)


def _add_page(
    app: FastAPI,
    service: Service,
    model: TorchModel,
    path: Source | None,
    beside: Source | None,
) -> None:
    """Add the page's files, and what it asks for once: the model, and its tokens' texts.

    `path` is where the model lies, if clients may know it.
    """
    files = page_files()

    async def file(request: Request) -> Response:
        path = request.scope["path"]
        if path not in files:  # a route also matches its path with a newline behind it
            raise HTTPException(404)
        return _cached_response(request, files[path], media_type(path))

    for name in files:
        app.get(name, include_in_schema=False)(file)
    tokenizer, size = service.engine.tokenizer, service.engine.runner.config.vocab_size
    token_texts = cache(lambda: page_data.token_texts(tokenizer, size).encode())

    def describe(gpt: GPT) -> str:
        return page_data.describe_model(
            service.name,
            gpt,
            tokenizer,
            model.source,
            path=path,
            template=None if tokenizer is None else service.template,
            beside=None if beside is None else page_data.directory_name(beside),
        )

    @app.get("/inspect/model")
    async def the_model(request: Request) -> Response:
        return await _computed_json(model, request, describe)

    @app.get("/inspect/pieces")
    async def the_pieces(request: Request) -> Response:
        data = await asyncio.to_thread(token_texts)
        return _cached_response(request, data, "application/json")


def _add_beside(app: FastAPI, source: Source, queue: int) -> None:
    """Add another model, whose description and positions the page shows beside this one's."""
    from tiedgpt.core.model import GPT

    assert source.checkpoint  # it is loaded later, and must be there now
    name, inspection = page_data.directory_name(source), INSPECTIONS["positions"]
    tokenizer = tokenizer_for(source, None)
    model = TorchModel(lambda: GPT.from_pretrained(source), queue, source)

    @app.get("/beside/inspect/model")
    async def the_model(request: Request) -> Response:
        return await _computed_json(
            model, request, lambda gpt: page_data.describe_model(name, gpt, tokenizer, source)
        )

    async def positions(request: Request, body: TextBody) -> Response:
        options = body.model_dump(exclude={"text", "ids"}, exclude_none=True)
        options["text"] = body.text or body.ids or ""
        return await _computed_json(
            model,
            request,
            lambda gpt: page_data.inspect_model(inspection, gpt, tokenizer, None, options),
        )

    positions.__annotations__["body"] = inspection_body(inspection)
    app.post("/beside/inspect/positions", name="beside_positions")(positions)


async def _computed_json(
    model: TorchModel, request: Request, function: Callable[[GPT], str]
) -> Response:
    """Return the JSON that a function computes with the model."""
    return Response(await model.run(request, function), media_type="application/json")


def _cached_response(request: Request, data: bytes, media_type: str) -> Response:
    """Return data, or 304 if the client has it."""
    headers = HEADERS | {"etag": etag(data)}
    if headers["etag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(data, headers=headers, media_type=media_type)


def _add_operation(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        if not app.state.ready:
            raise APIError(503, "the server is ending", code="shutting_down")
        return {"status": "ready"}

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": tiedgpt.__version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        text = await asyncio.to_thread(service.metrics.text)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _copy_model(engine: Engine) -> GPT:
    """Return a copy of the engine's model: `inspect` listens inside it while the engine reads."""
    if engine.backend != "torch":
        raise UserError("embeddings and inspection need the model in torch: serve its source")
    return copy.deepcopy(engine.model)
