"""Notice the line of user code after which two parameters that were one are two, or the reverse.

    with guard(model) as watch:
        model.load_state_dict(state, assign=True)     # TieWarning: train.py:12: ...
    watch.events                                      # what happened, where, and what to do

How it works. `sys.settrace` calls a trace function before each line of user code (not of torch,
site-packages or the standard library) and when a function returns. There the guard looks at the
few parameters that are shared or could be (of an embedding's shape): are they the same objects in
the same memory? All parameters are compared only after a call into `nn.Module` that can replace
some, and when the guard ends. So a change is known before the next line runs, and is attributed to
the line that ran last. (Registration hooks do not fire for `to_empty`, for `_parameters[...] =`,
for `del`, or for an overwritten `.to`.)

A guard watches the thread it was entered in. What another thread changes is noticed on this
thread's next line and attributed to its last one.

In this file: `guard` and `Guard`; slots and how they changed; the trace function.
"""

from __future__ import annotations

import inspect
import linecache
import sys
import sysconfig
import threading
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from tiedgpt.core.model import GPT
from tiedgpt.errors import CheckFailedError, UserError
from tiedgpt.tie.heads import Unembed, storage_key
from tiedgpt.tie.modules import EMBEDDINGS

Action = Literal["warn", "raise"]
Kind = Literal["split", "aliased", "joined"]
Trace = Callable[[FrameType, str, Any], Any]


class TieWarning(UserWarning):
    """Two parameters that were one are two, or the reverse."""


class TieBrokenError(CheckFailedError):
    """The same, if the guard was asked to raise."""


@dataclass(frozen=True)
class TieChange:
    """Slots (names of parameters) that were one and are not, or the reverse."""

    kind: Kind
    """split: two matrices; aliased: two Parameters on one storage; joined: one Parameter again."""
    names: tuple[str, ...]
    """The slots, by their names before."""
    text: str
    """What happened, with the shapes."""
    advice: str
    """What to do about it."""


@dataclass(frozen=True)
class TieEvent:
    """A change of the tie and the line of user code that made it."""

    file: str
    line: int
    code: str
    """The line's text; empty if the source is not available."""
    change: TieChange

    def __str__(self) -> str:
        code = f" `{self.code}`" if self.code else ""
        return f"{self.file}:{self.line}:{code}: {self.change.text}; {self.change.advice}"


def guard(module: nn.Module, *, action: Action = "warn") -> Guard:
    """Return a context manager that watches which parameters of any module are one.

    Inside `with guard(model) as watch:` every change is added to `watch.events` and either warned
    of (`TieWarning`, at the line that made it) or raised (`TieBrokenError`, before the next line
    runs; the watch ends with it). An exception already on its way is never replaced.

    On GPT-2 124M and two CPU cores a line of user code costs 4 to 6 microseconds more, one that
    sets an attribute of a module (`model.eval()`) half a millisecond, and a one-token forward, all
    of it library code, 2 to 4 %; a training step costs no more than can be measured.
    """
    if not isinstance(module, nn.Module):
        raise UserError(f"a guard watches a torch.nn.Module, got {type(module).__name__}")
    if action not in get_args(Action):
        raise UserError(
            f"action must be one of {', '.join(map(repr, get_args(Action)))}, got {action!r}"
        )
    return Guard(module, action)


class Guard:
    """A watch over one module; see `guard`."""

    def __init__(self, module: nn.Module, action: Action) -> None:
        self.module = module
        self.action = action
        self.events: list[TieEvent] = []
        self._active = False
        self.changed = False  # a function was called that can replace a parameter
        self._where = ("", 0)  # file and line that is running
        self._body: tuple[FrameType, int] | None = None
        self._tracer: _Tracer | None = None

    def __enter__(self) -> Guard:
        if self._tracer is not None:
            raise UserError("this guard is in use; make another")
        self._remember(_slots(self.module))
        frame = _user_frame(inspect.currentframe())
        if frame is not None:
            self._body = (frame, frame.f_lineno)
            self._where = (frame.f_code.co_filename, frame.f_lineno)
        self._active = True
        self._tracer = _Tracer.of_this_thread()
        self._tracer.add(self, frame)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._active = False
        if self._tracer is not None:
            self._tracer.remove(self, _user_frame(inspect.currentframe()))
        self._tracer = self._body = None
        self._report(self._compare(), may_raise=error is None)

    def before_line(self, frame: FrameType) -> None:
        """Check what the lines before this one did, and remember that this one is next."""
        if not self._active or self._body == (frame, frame.f_lineno):
            return  # the line of the `with` again: the body is done, and __exit__ checks
        self._check()
        self._where = (frame.f_code.co_filename, frame.f_lineno)

    def after_return(self, frame: FrameType) -> None:
        """Check when a user's function returns; its caller's line goes on."""
        if not self._active:
            return
        self._check()
        caller = _user_frame(frame.f_back)
        if caller is not None:
            self._where = (caller.f_code.co_filename, caller.f_lineno)

    def _check(self) -> None:
        """Compare if needed. If that raises (an error, or a warning made one), stop watching.

        Python drops a trace function that raises; `__exit__` restores it for other guards.
        """
        if not self.changed and all(slot.unchanged() for slot in self._watched):
            return
        try:
            self._report(self._compare(), may_raise=True)
        except BaseException:
            self._active = False
            raise

    def _compare(self) -> list[TieEvent]:
        """Compare all parameters with what they were, and remember them as they are."""
        self.changed = False
        now = _slots(self.module)
        changes = _changes(self._before, now)
        self._remember(now)
        file, line = self._where
        code = linecache.getline(file, line).strip()
        return [TieEvent(file, line, code, change) for change in changes]

    def _report(self, events: list[TieEvent], *, may_raise: bool) -> None:
        self.events += events
        if events and self.action == "raise" and may_raise:
            raise TieBrokenError("; ".join(map(str, events)))
        for event in events:
            text = f"{event.change.text}; {event.change.advice}"
            warnings.warn_explicit(text, TieWarning, event.file, event.line)

    def _remember(self, now: dict[str, _Slot]) -> None:
        """Keep the slots, and choose the few that are checked before each line."""
        self._before = now
        tables = {
            tuple(part.weight.shape)
            for part in self.module.modules()
            if isinstance(part, EMBEDDINGS) and not isinstance(part.weight, UninitializedParameter)
        }
        shared = {name for names in _groups(now) for name in names}
        self._watched = [
            _Watch(self.module, name, slot.parameter)
            for name, slot in now.items()
            if name in shared or slot.shape in tables
        ]


# Slots: the places in a module that hold a parameter, by name (`lm_head.weight`). Slots that hold
# the same Parameter are one. Slots that hold two Parameters on one storage are aliased: they move
# together until something replaces one of them, and an optimizer steps them twice.


@dataclass(frozen=True)
class _Slot:
    """What a name stood for at one moment."""

    parameter: Tensor
    """Kept alive, so that its id and its memory are not reused meanwhile."""
    storage: Hashable
    shape: tuple[int, ...]
    device: torch.device


def _slots(module: nn.Module) -> dict[str, _Slot]:
    """Return every slot of a module.

    A tied GPT has no second parameter. Its use of W to predict counts as a slot, named `head` (or
    by the name of the `Unembed` in a head), so that its loss is noticed. A lazy parameter has no
    shape or memory yet, and is a slot once it has.
    """
    found = dict(module.named_parameters(remove_duplicate=False))
    for name, part in module.named_modules():
        if isinstance(part, GPT) and part.head is None:
            found[f"{name}.head".removeprefix(".")] = part.wte.weight
        elif isinstance(part, Unembed):
            found[name] = part.wte.weight
    return {
        name: _Slot(p, storage_key(p), tuple(p.shape), p.device)
        for name, p in found.items()
        if not isinstance(p, UninitializedParameter)
    }


class _Watch:
    """One slot, looked up as user code does it: attribute by attribute from the module."""

    def __init__(self, module: nn.Module, name: str, parameter: Tensor) -> None:
        self._module, self._path, self._parameter = module, name.split("."), parameter
        self._found, self._address = self._look()

    def unchanged(self) -> bool:
        """Whether the slot holds the same object on the same memory."""
        found, address = self._look()
        return found is self._found and address == self._address

    def _look(self) -> tuple[object, int]:
        part: Any = self._module
        for name in self._path:
            part = getattr(part, name, None)  # None also for the `head` of a tied GPT
        try:
            return part, self._parameter.data_ptr()
        except RuntimeError:  # sharded and wrapped tensors have no address
            return part, 0


def _groups(slots: dict[str, _Slot]) -> list[tuple[str, ...]]:
    """Return the names that stand for the same memory, two or more of them."""
    by_storage: dict[Hashable, list[str]] = {}
    for name, slot in slots.items():
        by_storage.setdefault(slot.storage, []).append(name)
    return [tuple(names) for names in by_storage.values() if len(names) > 1]


def _changes(before: dict[str, _Slot], after: dict[str, _Slot]) -> list[TieChange]:
    """Return what became of every group of slots, and the groups that are new."""
    found: list[TieChange] = []
    for names in _groups(before):
        places = {name: _in_its_place(name, names, before, after) for name in names}
        parameters = {frozenset(id(after[new].parameter) for new in p) for p in places.values()}
        storages = {frozenset(after[new].storage for new in p) for p in places.values()}
        was_one = len({id(before[name].parameter) for name in names}) == 1
        if len(storages) > 1:
            found.append(_split(names, places, before, after))
        elif len(parameters) > 1 and was_one:
            found.append(_aliased(names, before[names[0]].shape))
        elif len(parameters) == 1 and not was_one:
            found.append(_joined(names, after, "two Parameters over one memory"))
    for names in _groups(after):
        storage_of = {}
        for name in names:
            gone = (old for old in before if old not in after and old.startswith(f"{name}."))
            origin = name if name in before else next(gone, "")  # `head.weight`, if `head` is new
            if origin:
                storage_of[name] = before[origin].storage
        if len(set(storage_of.values())) > 1:
            found.append(_joined(tuple(storage_of), after, "two matrices"))
    return found


def _in_its_place(
    name: str, group: tuple[str, ...], before: dict[str, _Slot], after: dict[str, _Slot]
) -> list[str]:
    """Return the slots that stand where a slot was.

    A module that was wrapped or replaced has other names: `lm_head.weight` may have become
    `lm_head.1.weight`, or `lm_head.modules_to_save.default.weight` beside the original. Slots with
    the matrix's shape count.
    """
    if name in after:
        return [name]
    shapes = {before[n].shape for n in group} | {after[n].shape for n in group if n in after}
    parent = f"{name.removesuffix('.weight')}."
    return [
        new
        for new, slot in after.items()
        if new not in before and new.startswith(parent) and slot.shape in shapes
    ]


def _split(
    names: tuple[str, ...],
    places: dict[str, list[str]],
    before: dict[str, _Slot],
    after: dict[str, _Slot],
) -> TieChange:
    """Describe slots that were one matrix and are not."""
    became = []
    for name in names:
        if name in after:
            if after[name].storage != before[name].storage:
                became.append(f"{name} is another matrix now, {after[name].shape}")
        elif places[name]:
            what = " and ".join(f"{new} {after[new].shape}" for new in places[name])
            became.append(f"in the place of {name} is {what}")
        else:
            became.append(f"{name} is gone")
    text = f"{_named(names)} {before[names[0]].shape} were one matrix and are not: "
    advice = _advice(names, places, before, after)
    return TieChange("split", names, text + ", ".join(became), advice)


def _advice(
    names: tuple[str, ...],
    places: dict[str, list[str]],
    before: dict[str, _Slot],
    after: dict[str, _Slot],
) -> str:
    """Say what to do about a split, by the names, shapes and devices."""
    again = "tie(model) makes them one again"
    now = [new for name in names for new in places[name]]
    devices = {after[new].device.type for new in now}
    if any("modules_to_save" in new for new in now):
        return (
            "the adapter trains a copy of its own: give PEFT ensure_weight_tying=True, or adapt "
            "both names"
        )
    if not all(places.values()):
        return f"nothing of that shape predicts now; if it should, put a head back and {again}"
    if len({after[new].shape for new in now}) > 1:
        return f"only one of them was resized: resize both, then {again}"
    if any(before[name].device.type == "meta" for name in names) and "meta" not in devices:
        return f"to_empty gives every name memory of its own: {again} before weights are loaded"
    if "head" in {name.rpartition(".")[2] for name in names}:
        return (
            "if the head should share W, tie(model); if it is meant to have a matrix of its own, "
            "untie(model) or replace_head(model, module) does it and reports it"
        )
    return f"{again}; if two are meant, set config.tie_word_embeddings=False so that files say so"


def _aliased(names: tuple[str, ...], shape: tuple[int, ...]) -> TieChange:
    return TieChange(
        "aliased",
        names,
        f"{_named(names)} {shape} were one Parameter and are two over the same memory",
        "an optimizer made now would step it twice, and the next copy or move parts them "
        "(load_state_dict(assign=True) does this); tie(model) makes them one again",
    )


def _joined(names: tuple[str, ...], after: dict[str, _Slot], were: str) -> TieChange:
    """Describe slots that have become one, or share a storage now."""
    named = f"{_named(names)} {after[names[0]].shape}"
    if len({id(after[name].parameter) for name in names}) > 1:
        return TieChange(
            "aliased",
            names,
            f"{named} were two matrices and are two Parameters over one memory",
            "an optimizer would step it twice: assign the Parameter itself, or use tie(model)",
        )
    return TieChange(
        "joined",
        names,
        f"{named} were {were} and are one Parameter",
        "an optimizer made before this holds the one that is gone: make a new one; "
        "config.tie_word_embeddings should be True now",
    )


def _named(names: tuple[str, ...]) -> str:
    return " and ".join((*names[1:], names[0]))


# The trace function


class _Tracer:
    """The one trace function of a thread, for all guards that are active there.

    The first guard installs it; the last one puts back what was there before (a debugger's, a
    coverage tool's), which is called on meanwhile. Guards may end in any order, as tasks of asyncio
    do. If something else has replaced it, it is left alone: the next guard gets another.
    """

    def __init__(self) -> None:
        self.guards: tuple[Guard, ...] = ()
        self._thread = threading.get_ident()
        self._before: Any = sys.gettrace()
        self._frames: dict[FrameType, Trace | None] = {}

    @classmethod
    def of_this_thread(cls) -> _Tracer:
        """Return the one that is installed, or a new one."""
        tracer: _Tracer | None = getattr(_THREAD, "tracer", None)
        if tracer is None or not tracer.guards or sys.gettrace() != tracer._on_call:
            tracer = _THREAD.tracer = cls()
        return tracer

    def add(self, guard: Guard, frame: FrameType | None) -> None:
        """Let a guard see each line from now on."""
        first = not self.guards
        self.guards += (guard,)
        self._install(frame, all_frames=first)

    def remove(self, guard: Guard, frame: FrameType | None) -> None:
        """Let a guard see no more; after the last one, all is as it was before the first."""
        self.guards = tuple(other for other in self.guards if other is not guard)
        here = threading.get_ident() == self._thread
        if not self.guards:
            if here and sys.gettrace() in (None, self._on_call):
                sys.settrace(self._before)
            for known, before in self._frames.items():
                known.f_trace = before
            self._frames.clear()
        elif here and sys.gettrace() is None:  # Python dropped it because a guard raised
            self._install(frame, all_frames=False)

    def _install(self, frame: FrameType | None, *, all_frames: bool) -> None:
        """Trace new frames, and those of user code that are running, one by one."""
        while frame is not None:
            if _origin(frame) == USER and (all_frames or frame.f_trace is None):
                self._frames.setdefault(frame, frame.f_trace)
                frame.f_trace = self._trace_lines(frame.f_trace)
            frame = frame.f_back
        sys.settrace(self._on_call)

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Python is about to run a function: trace its lines if it is the user's."""
        inner = None
        if self._before is not None:
            installed = sys.gettrace()
            inner = self._before(frame, event, arg)
            if self.guards and sys.gettrace() != installed:
                sys.settrace(installed)  # coverage's tracer installs itself when it is called
        if not self.guards:  # the last one ended in another thread, or under another tracer
            if sys.gettrace() == self._on_call:
                sys.settrace(self._before)
            return inner
        code = frame.f_code
        origin = _ORIGINS.get(code.co_filename)
        if origin is None:
            origin = _origin(frame)
        if origin == USER:
            for guard in self.guards:
                guard.before_line(frame)
            return self._trace_lines(inner)
        if origin == MODULE and code.co_name in CHANGERS:
            for guard in self.guards:
                guard.changed = True
        return inner

    def _trace_lines(self, inner: Trace | None) -> Trace:
        """Return the trace function of one frame of user code, which calls `inner` on."""

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal inner
            if inner is not None:
                inner = inner(frame, event, arg)
            if not self.guards:
                return inner
            if event == "line":
                for guard in self.guards:
                    guard.before_line(frame)
            elif event == "return":
                for guard in self.guards:
                    guard.after_return(frame)
            return trace

        return trace


def _library_roots() -> tuple[str, ...]:
    """Return the directories of code that is not the user's: Python, packages, torch, tiedgpt."""
    paths = [sysconfig.get_path(n) for n in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [str(Path(torch.__file__).parent), str(Path(__file__).parents[1])]
    return tuple({f"{form}/" for path in paths for form in (path, Path(path).resolve())})


_THREAD = threading.local()
LIBRARY, USER, MODULE = range(3)
CHANGERS = frozenset(
    "__setattr__ __delattr__ __setstate__ _apply register_parameter register_module "
    "add_module".split()
)
"""Functions of nn.Module that can replace a parameter."""
_LIBRARIES = _library_roots()
_PACKAGES = frozenset(("site-packages", "dist-packages"))
_GENERATED = ("<frozen", "<eval_with_key", "<attrs", "<__", "<torch")
_ORIGINS: dict[str, int] = {inspect.getfile(nn.Module): MODULE}


def _origin(frame: FrameType) -> int:
    """Whether a frame runs user code, library code, or torch's file of nn.Module."""
    file = frame.f_code.co_filename
    origin = _ORIGINS.get(file)
    if origin is None:
        library = file.startswith((*_LIBRARIES, *_GENERATED))
        library = library or not _PACKAGES.isdisjoint(Path(file).parts)
        origin = _ORIGINS[file] = LIBRARY if library else USER
    return origin


def _user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the frame, or the nearest of its callers, that runs user code."""
    while frame is not None and _origin(frame) != USER:
        frame = frame.f_back
    return frame
