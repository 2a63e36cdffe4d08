"""`tiedgpt serve [MODEL]`: the model behind OpenAI's API."""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import re
import signal
import socket
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tiedgpt.cli.console import console, fact, note
from tiedgpt.cli.options import parse
from tiedgpt.cli.source import (
    EngineOptions,
    SourceOrNewest,
    chat_template,
    model_name,
    source_or_newest,
)
from tiedgpt.errors import UserError
from tiedgpt.options import option

if TYPE_CHECKING:
    from tiedgpt.core.model import GPT
    from tiedgpt.infer import Engine
    from tiedgpt.weights.source import Source

ABOUT = """Serve a model with OpenAI's API.

  tiedgpt serve runs/my-1 --port 8000

Open the address in a browser for a page that shows every prediction, the matrix W and its rows, the
layers and the heads.

The key can also be given in the environment variable TIEDGPT_API_KEY, which other users of this
machine cannot see."""
KEY = "TIEDGPT_API_KEY"


@dataclass(frozen=True, kw_only=True)
class Arguments(SourceOrNewest, EngineOptions):
    """Serve a model with OpenAI's API."""

    host: str = option(
        "127.0.0.1",
        "The address to listen on; 0.0.0.0 is open to other machines and needs a key or "
        "--insecure.",
    )
    port: int = option(8000, "The port; 0: any free port.", least=0, most=65535)
    api_key: str | None = option(
        None,
        "The key that clients must send as Authorization: Bearer KEY, on every route but /health.",
    )
    insecure: bool = option(False, "Allow other machines to use the model without a key.")
    allow_host: tuple[str, ...] = option(
        (),
        "Another host name that clients use for this server; may be given several times.",
        repeated=True,
    )
    name: str | None = option(
        None, "The model's name for clients; default: the name of its directory."
    )
    beside: str | None = option(
        None, "Another model, which the page compares with this one: untied, or before tuning."
    )
    slots: int = option(8, "Maximum number of texts that are generated at the same time.", least=1)
    queue: int = option(
        64,
        "Maximum number of texts that wait, and of inspections; further requests get status 429.",
        least=1,
    )
    drain: float = option(
        30.0, "Seconds that running texts have to finish after SIGTERM.", least=0, most=3600
    )


def run(arguments: list[str]) -> None:
    """Serve until a signal."""
    args = parse(Arguments, "serve", arguments, ABOUT)
    key = os.environ.get(KEY) or None if args.api_key is None else args.api_key
    if key is not None and not re.fullmatch("[!-~]+", key):
        raise UserError("--api-key must be ASCII letters, digits and symbols, without spaces")
    if args.host.startswith("unix:"):
        hint = "use --host 127.0.0.1 with a --port"
        raise UserError(f"--host {args.host} is a unix socket; serve listens on TCP", hint=hint)
    if not key and not args.insecure and not _is_local(args.host):
        raise UserError(
            f"--host {args.host} lets other machines use the model",
            hint=f"give --api-key (or {KEY}) or --insecure",
        )
    try:
        import_module("tiedgpt.serve.app")  # all packages of the extra
        from tiedgpt.serve.server import open_socket
    except ImportError as error:
        raise UserError(
            f"`tiedgpt serve` needs the package {error.name}", hint="pip install 'tiedgpt[serve]'"
        ) from None
    source = source_or_newest(args.source, task="lm")
    with open_socket(args.host, args.port) as listener:
        _serve(args, source, key, listener)


def _serve(args: Arguments, source: Source, key: str | None, listener: socket.socket) -> None:
    """Listen at once, answering 503 until the model is loaded; serve until a signal."""
    from tiedgpt.serve.app import create_app
    from tiedgpt.serve.guards import Hosts, Limits, access_log
    from tiedgpt.serve.server import Server

    def load() -> GPT:
        from tiedgpt.core.model import GPT  # torch takes seconds, in which the server listens

        device = engine.model.wte.weight.device if engine.backend == "torch" else "cpu"
        return GPT.from_pretrained(source, **args.loading).to(device)

    def tell_drain(n_texts: int) -> None:
        texts = f"{n_texts} text{'s are' if n_texts > 1 else ' is'} being finished"
        note(f"{texts}, for at most {args.drain:g} seconds; Ctrl-C again ends at once")

    limits = Limits(queue=args.queue, drain_seconds=args.drain)
    hosts = Hosts.of(args.host, args.allow_host)
    server = Server(limits, tell_drain)
    with (
        server.listening(listener) as ended,
        args.engine(source, slots=args.slots, queue_size=args.queue) as engine,
    ):
        engine.generate([0], max_new_tokens=2)  # kernels are compiled before clients come
        name = args.name or model_name(source)
        template = chat_template(args.tokenizer_source or source)
        app = create_app(
            engine,
            name=name,
            key=key,
            limits=limits,
            hosts=hosts,
            load=load,
            source=source,
            template=template,
            beside=None if args.beside is None else source_or_newest(args.beside, task="lm"),
        )
        handler = logging.StreamHandler(sys.stderr)
        for logger in (access_log, logging.getLogger("uvicorn.error")):
            logger.addHandler(handler)
            logger.propagate = False
        access_log.setLevel(logging.INFO)
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, server.handle_exit)
        server.open(app, engine)
        is_chat = template is not None and engine.tokenizer is not None
        _show_calls(args, name, key, engine, listener.getsockname()[1], is_chat=is_chat)
        ended.result()


def _show_calls(
    args: Arguments, name: str, key: str | None, engine: Engine, port: int, *, is_chat: bool
) -> None:
    """Print the address, the limits, and two commands that call the server."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(args.host, args.host)
    host = f"[{host}]" if ":" in host and "[" not in host else host
    url = f"http://{host}:{port}"
    fact("address", f"{url} (in a browser: the page)", style="bold")
    fact("model", f"{name}: {engine!r}")
    fact("limits", f"{args.slots} texts at a time, {args.queue} wait; 1 MiB a request")
    if args.api_key is not None:
        fact("key", f"clients below read it from the environment variable {KEY}")
    path, answer = "completions", "text"
    request: dict[str, Any] = {"prompt": "Once" if engine.tokenizer is not None else [0]}
    if is_chat:
        path, answer = "chat/completions", "message.content"
        request = {"messages": [{"role": "user", "content": "Hello"}]}
    ((field, value),) = request.items()
    header = f' -H "Authorization: Bearer ${KEY}"' if key else ""
    body = json.dumps(request | {"max_tokens": 20})
    api_key, imports = (f"os.environ[{KEY!r}]", "import os; ") if key else ("'none'", "")
    console().print(
        f"\ncurl {url}/v1/{path}{header} -H 'Content-Type: application/json' -d '{body}'\n\n"
        f"{imports}from openai import OpenAI; print(OpenAI(base_url='{url}/v1', api_key={api_key})"
        f".{path.replace('/', '.')}.create(model={name!r}, {field}={value!r})"
        f".choices[0].{answer})\n"
    )
    sys.stdout.flush()


def _is_local(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
