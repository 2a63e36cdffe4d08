"""/v1/embeddings and /inspect/NAME, which torch computes.

The engine may compute packed weights, and `inspect` adds hooks to modules. So both use a model of
their own, which the first request loads. They run one at a time, in another thread.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request

from tiedgpt.infer import Engine
from tiedgpt.infer.generation_config import Prompt
from tiedgpt.inspect.registry import Inspection
from tiedgpt.serve.errors import APIError
from tiedgpt.serve.page_data import inspect_model
from tiedgpt.serve.schemas import Body, EmbeddingRequest, TextBody, as_list
from tiedgpt.serve.streams import CLIENT_LEFT, encode_prompt, wait_for_disconnect
from tiedgpt.weights.source import Source

if TYPE_CHECKING:
    from tiedgpt.core.model import GPT
    from tiedgpt.serve.completions import Service

T = TypeVar("T")


class TorchModel:
    """The model in torch, for one caller at a time; up to `queue` others wait for their turn."""

    def __init__(self, load: Callable[[], GPT], queue: int, source: Source | None) -> None:
        self._load, self._queue, self.source = load, queue, source
        self._lock = asyncio.Lock()
        self._n_waiting = 0

    async def run(self, request: Request, function: Callable[[GPT], T]) -> T:
        """Call a function with the model in another thread; 429 if too many wait.

        A client that disconnects leaves the queue, and nothing is computed for it.
        """
        if self._lock.locked() and self._n_waiting >= self._queue:
            raise APIError(429, "too many requests wait: try again later", code="queue_full")
        self._n_waiting += 1
        try:
            await self._wait_for_turn(request)
        finally:
            self._n_waiting -= 1
        computation = asyncio.create_task(asyncio.to_thread(lambda: function(self._model)))
        computation.add_done_callback(lambda _: self._lock.release())
        return await asyncio.shield(computation)  # a thread cannot be cancelled

    async def _wait_for_turn(self, request: Request) -> None:
        """Acquire the lock; raise `APIError` if the client disconnects before."""
        turn = asyncio.create_task(self._lock.acquire())
        departure = asyncio.create_task(wait_for_disconnect(request))
        try:
            await asyncio.wait((turn, departure), return_when=asyncio.FIRST_COMPLETED)
            if departure.done():
                raise APIError(CLIENT_LEFT, "the client disconnected", code="cancelled")
        except BaseException:
            if not turn.cancel():
                self._lock.release()
            raise
        finally:
            departure.cancel()

    @cached_property
    def _model(self) -> GPT:
        return self._load().eval()


def _read(engine: Engine, text: Prompt, body: EmbeddingRequest) -> list[int]:
    """Return the ids of an input, or as many of the first as are asked for (-1: the context's)."""
    max_tokens, adds = body.truncate_prompt_tokens, body.add_special_tokens
    if max_tokens is not None:
        limit = engine.runner.config.n_positions if max_tokens < 0 else max_tokens
        text = encode_prompt(engine, text, "input", room=None, add_special_tokens=adds)[:limit]
    return encode_prompt(engine, text, "input", add_special_tokens=adds)


async def embed(
    service: Service, torch_model: TorchModel, request: Request, body: EmbeddingRequest
) -> dict[str, Any]:
    """Return embeddings: the body's output, averaged over tokens or of the last one."""

    def compute(model: GPT) -> tuple[list[Any], int]:
        import torch

        width = service.engine.runner.config.n_embd
        if body.dimensions not in (None, width):
            problem = f"dimensions must be {width}: cut and normalize the vector yourself"
            raise APIError(400, problem, param="dimensions")
        each = [_read(service.engine, one, body) for one in as_list(body.input)]
        vectors = []
        for ids in each:
            with torch.inference_mode():
                h = model.body(torch.tensor([ids], device=model.wte.weight.device))[0].float()
                pooled = h[-1] if body.pooling == "last" else h.mean(0)
                if body.normalize:
                    pooled = torch.nn.functional.normalize(pooled, dim=0)
                vector = pooled.cpu().numpy()
            packed = base64.b64encode(vector.astype("<f4").tobytes()).decode()
            vectors.append(packed if body.encoding_format == "base64" else vector.tolist())
        return vectors, sum(map(len, each))

    vectors, n_tokens = await torch_model.run(request, compute)
    data = [
        {"object": "embedding", "index": index, "embedding": vector}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    return {"object": "list", "data": data, "model": service.name, "usage": usage}


async def inspect(
    service: Service, model: TorchModel, request: Request, inspection: Inspection, body: Body
) -> str:
    """Return the JSON of an inspection."""
    options = body.model_dump(exclude={"text", "ids"}, exclude_none=True)
    options |= inspection.served_with

    def compute(gpt: GPT) -> str:
        if isinstance(body, TextBody):
            if bool(body.text) == bool(body.ids):
                raise APIError(400, "give text or ids, and not both", param="text")
            text, param = body.text or body.ids or [], "text" if body.text else "ids"
            options["text"] = encode_prompt(
                service.engine, text, param, max_tokens=inspection.max_tokens
            )
        return inspect_model(inspection, gpt, service.engine.tokenizer, model.source, options)

    return await model.run(request, compute)
