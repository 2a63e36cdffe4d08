"""A training, from what was asked for to the published model.

    from tiedgpt.train import TrainOptions, train

    for event in train(TrainOptions(data=("my.txt",), minutes=1), out="runs/mine"):
        print(event)

`tiedgpt train` and `tiedgpt tune` iterate the same function and draw what it yields.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tiedgpt.errors import UserError
from tiedgpt.train.events import AlreadyFinished, Event, Note, Planned
from tiedgpt.train.loop import Trainer
from tiedgpt.train.objective import Progress
from tiedgpt.train.objectives import open_sources
from tiedgpt.train.pace import busy_note
from tiedgpt.train.parallel import Parallel, join_world
from tiedgpt.train.prepare import prepare
from tiedgpt.train.sizing import choose_size, make_longer, make_plan, training_device
from tiedgpt.train.storage import RunDirectory, compare_duration, find_run, make_record, read_plan
from tiedgpt.train.tune_options import AnyOptions


def train(
    options: AnyOptions,
    out: str | Path | None = None,
    *,
    parallel: Parallel | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
    track: Callable[[Mapping[str, Any]], None] | None = None,
    progress: Progress | None = None,
    scoring: Progress | None = None,
    began: float | None = None,
) -> Iterator[Event]:
    """Train in the directory `out`, or go on there; yield what happens as it happens.

    Without `out` it is the newest run in runs/ that these options mean, or a new one. Where
    `stop_requested` returns true after a step, the run is saved and ends; the same call resumes it.
    `track` is given each line of metrics.jsonl, `progress` how much of the text is encoded,
    `scoring` how many batches of the final score are done. The
    time of `minutes` runs from `began`, in seconds of `time.perf_counter`; without it, from now.

    Raises `UserError` or `CorruptInputError` for what cannot be trained, `NoRoomError` for what
    does not fit in memory or on the disk, `DivergedError` where training leaves the finite numbers.
    """
    began, deadline = time.perf_counter() if began is None else began, None
    with contextlib.ExitStack() as stack:
        device = training_device(options.device)
        world = stack.enter_context(join_world(parallel, device))
        if out is not None:
            world.on_main(lambda: require_same(options, RunDirectory(Path(out))))
        sources = world.main_first(lambda: open_sources(options))
        digest = world.on_main(sources.digest) if options.data else None
        directory = RunDirectory(Path(out or world.on_main(lambda: find_run(options, digest))))
        if world.is_main:
            stack.enter_context(directory.lock())
        tables = world.main_first(lambda: _open_record(options, directory, digest))
        config, plan = read_plan(tables) if tables else (None, None)
        is_finished = bool(tables) and world.main_first(directory.is_finished)
        if is_finished:
            yield AlreadyFinished(directory.path)
            return
        yield from _hub_notes(options)
        own = sources.adapt(options)
        objective, data = world.main_first(
            functools.partial(prepare, directory, own, sources, config, progress)
        )
        del sources  # the text, which may be held in memory
        if plan is None:
            yield Note("measuring this machine")
            if options.duration.unit == "minutes" and (busy := busy_note()):
                yield Note(busy)
            own, objective, data, reason, speed = choose_size(own, objective, data, world)
            plan = make_plan(
                own, objective, data, world.device,
                world=world, reason=reason, speed=speed, spent=time.perf_counter() - began,
            )  # fmt: skip
            if plan.minutes is not None:
                deadline = began + 60 * plan.minutes
            tables = make_record(options, objective.config, plan, data.counts, digest, world)
            world.on_main(lambda: directory.write_record(tables))
        yield Planned(directory, options, objective, data, plan, world)
        yield from Trainer(
            directory, objective, data, plan, world.device,
            stop_requested=stop_requested, track=track, world=world, deadline=deadline,
            score_all=options.score == "all", progress=scoring,
        ).run()  # fmt: skip


def require_same(options: AnyOptions, directory: RunDirectory) -> float | None:
    """Raise `UserError` where a run has other options; return how many times as long it goes on."""
    out, tables = directory.path, directory.read_record()
    differences = options.differences(tables.get("options", {})) if tables else []
    times = compare_duration(options, tables) if differences and directory.is_finished() else None
    if differences and times is None:
        raise UserError(
            f"{out} holds a run with other options ({'; '.join(differences)})",
            hint=f"give the same options to resume, or another --out, with --start {out} to begin "
            "from its weights",
        )
    return times


def _open_record(
    options: AnyOptions, directory: RunDirectory, digest: str | None
) -> dict[str, Any]:
    """Return run.toml's tables, {} for a fresh run; a finished run is made longer where asked.

    Raises `UserError` where the run has other options, or other data.
    """
    tables = directory.read_record()
    if tables and digest != tables.get("text", {}).get("sha256"):
        raise UserError(
            f"the text has changed since {directory.path} began",
            hint="give another --out, or the same text",
        )
    if (times := require_same(options, directory)) is not None:
        return make_longer(directory, options, times)
    return tables


def _hub_notes(options: AnyOptions) -> Iterator[Note]:
    """Yield a note for each model or tokenizer that is not on this machine by its name."""
    for source in (options.tokenizer, options.start):
        if source not in (None, "bpe", "char") and not Path(source).exists():
            yield Note(f"{source}: not a path, looking on the Hugging Face hub")
