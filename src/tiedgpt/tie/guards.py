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
"""

from __future__ import annotations

import inspect
import linecache
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from tiedgpt.core.model import GPT
from tiedgpt.errors import CheckFailedError, UserError
from tiedgpt.tie.heads import Unembed
from tiedgpt.tie.modules import unwrap
from tiedgpt.weights.checkpoint import TIE_KEY
from tiedgpt.weights.tensors import Storage
from tiedgpt.weights.torch_file import stored_tensor

Trace = Callable[[FrameType, str, Any], Any]

ONE, ALIASED, TWO = "one Parameter", "two Parameters over one memory", "two matrices"
KINDS = {ONE: "joined", ALIASED: "aliased", TWO: "split"}
AGAIN = "tie(model) makes them one again"
ADVICE = {
    TWO: AGAIN,
    ONE: "an optimizer made before this holds the one that is gone: make a new one",
    ALIASED: "an optimizer made now would step it twice, and the next copy or move parts them "
    "(load_state_dict(assign=True) does this); tie(model) makes them one Parameter",
}
OWN = "; if this is meant, tiedgpt.tie.replace_head(model, model.head) lets the config say so"
CHANGERS = frozenset(
    "__setattr__ __delattr__ __setstate__ _apply register_parameter register_module "
    "add_module".split()
)
"""Functions of nn.Module that can replace a parameter."""
MODULE_FILE = inspect.getfile(nn.Module)
HOMES = (sysconfig.get_path("stdlib"), *torch.__path__, str(Path(__file__).parents[1]))
LIBRARIES = tuple(f"{form}/" for home in HOMES for form in (home, Path(home).resolve()))
GENERATED = ("<frozen", "<eval_with_key", "<attrs", "<__", "<torch")


class TieWarning(UserWarning):
    """Two parameters that were one are two, or the reverse."""


class TieBrokenError(CheckFailedError):
    """The same, if the guard was asked to raise."""


@dataclass(frozen=True)
class TieEvent:
    """A change of the tie and the line of user code that made it."""

    file: str
    line: int
    code: str
    """The line's text; empty if the source is not available."""
    kind: str
    """split: two matrices; aliased: two Parameters on one storage; joined: one Parameter again."""
    names: tuple[str, ...]
    """The names of the parameters before. A tied GPT's use of W to predict is `head.weight`."""
    text: str
    """What happened, with the shapes."""
    advice: str
    """What to do about it."""

    def __str__(self) -> str:
        code = f" `{self.code}`" if self.code else ""
        return f"{self.file}:{self.line}:{code}: {self.text}; {self.advice}"


def guard(module: nn.Module, *, action: Literal["warn", "raise"] = "warn") -> Guard:
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
    if action not in ("warn", "raise"):
        raise UserError(f"must be one of 'warn', 'raise', got {action!r}", option="action")
    return Guard(module, action)


class Guard:
    """A watch over one module; see `guard`."""

    def __init__(self, module: nn.Module, action: str) -> None:
        self.module = module
        self.action = action
        self.events: list[TieEvent] = []
        self.changed = False  # a function was called that can replace a parameter
        self._active = False
        self._where = ("", 0)  # file and line that is running
        self._body: tuple[FrameType | None, int] = (None, 0)
        self._tracer: _Tracer | None = None

    def __enter__(self) -> Guard:
        if self._tracer is not None:
            raise UserError("this guard is in use", hint="make another")
        self._remember()
        frame = _user_frame(inspect.currentframe())
        self._body = (frame, frame.f_lineno if frame else 0)
        self._active = True
        self.step(frame)
        self._tracer = _Tracer.of_this_thread()
        self._tracer.guards += (self,)
        self._tracer.install(frame)
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._active = False
        if self._tracer is not None:
            self._tracer.remove(self, _user_frame(inspect.currentframe()))
        self._tracer, self._body = None, (None, 0)
        self._compare(may_raise=error is None)

    def before_line(self, frame: FrameType) -> None:
        """Check what the lines before this one did, unless it is the `with` again, at its end."""
        if self._body != (frame, frame.f_lineno):
            self.step(frame)

    def step(self, frame: FrameType | None) -> None:
        """Check what was done, and remember where what comes next will happen.

        All is compared if a watched parameter moved, or something was called that can replace one.
        If that raises, the watch ends: Python drops a trace function that raises, and `__exit__`
        restores it for other guards.
        """
        if not self._active:
            return
        if self.changed or self._look_up() != self._seen:
            self._active = False
            self._compare(may_raise=True)
            self._active = True
        if frame is not None:
            self._where = (frame.f_code.co_filename, frame.f_lineno)

    def _compare(self, *, may_raise: bool) -> None:
        """Compare all parameters with what they were; report what differs."""
        before, (file, line) = self._slots, self._where
        self._remember()
        code = linecache.getline(file, line).strip()
        changes = _find_changes(before, self._slots, self.module)
        events = [TieEvent(file, line, code, *change) for change in changes]
        self.events += events
        if events and self.action == "raise" and may_raise:
            raise TieBrokenError("; ".join(map(str, events)))
        for event in events:
            warnings.warn_explicit(f"{event.text}; {event.advice}", TieWarning, file, line)

    def _remember(self) -> None:
        """Keep all parameters as they are, and choose the few that are checked before each line."""
        self.changed, self._slots = False, _find_slots(self.module)
        tables = {m.weight.shape for m in self.module.modules() if isinstance(m, nn.Embedding)}
        shared = {name for names in _group_names(self._slots) for name in names}
        self._watched = [
            (name.split("."), slot.parameter)
            for name, slot in self._slots.items()
            if name in shared or slot.shape in tables
        ]
        self._seen = self._look_up()

    def _look_up(self) -> list[tuple[int, int]]:
        """Return the object under each watched name, found as user code does, and its address."""
        found = []
        for path, parameter in self._watched:
            part: Any = self.module
            for name in path:
                part = getattr(part, name, None)  # None also for the `head` of a tied GPT
            try:
                address = parameter.data_ptr()
            except RuntimeError:  # sharded and wrapped tensors have no address
                address = 0
            found.append((id(part), address))
        return found


class _Slot(NamedTuple):
    """What a parameter's name stood for. It is kept alive, so that its id is not used again."""

    parameter: Tensor
    storage: Storage
    shape: tuple[int, ...]


Slots = dict[str, _Slot]


def _find_slots(module: nn.Module) -> Slots:
    """Return every name of a parameter. A lazy parameter, without a shape yet, is left out.

    The names where a GPT predicts with W (`head.weight`) are added, although no parameter is there.
    """
    found = dict(module.named_parameters(remove_duplicate=False))
    for name, part in module.named_modules():
        if isinstance(part, GPT) and part.head is None:
            found[f"{name}.head.weight".removeprefix(".")] = part.wte.weight
        elif isinstance(part, Unembed):
            found[f"{name}.weight"] = part.wte.weight
    return {
        name: _Slot(p, stored_tensor(name, p).storage, tuple(p.shape))
        for name, p in found.items()
        if not isinstance(p, UninitializedParameter)
    }


def _group_names(slots: Slots) -> list[tuple[str, ...]]:
    """Return the names that stand for the same memory, two or more of them."""
    by_storage: dict[Storage, list[str]] = {}
    for name, slot in slots.items():
        by_storage.setdefault(slot.storage, []).append(name)
    return [tuple(names) for names in by_storage.values() if len(names) > 1]


def _find_places(name: str, before: Slots, after: Slots) -> list[str]:
    """Return the names that stand where a name was; none if it is gone.

    A module that was wrapped or replaced has other names: `lm_head.weight` may have become
    `lm_head.1.weight`, or `lm_head.modules_to_save.default.weight` beside the original.
    """
    if name in after:
        return [name]
    module, shape = f"{name.removesuffix('.weight')}.", before[name].shape
    new = [other for other in after if other not in before and other.startswith(module)]
    return [other for other in new if after[other].shape == shape]


def _describe_state(slots: Slots, places: list[list[str]]) -> str:
    """Say what the names in several places stand for."""
    storages = {frozenset(slots[name].storage for name in place) for place in places}
    parameters = {frozenset(id(slots[name].parameter) for name in place) for place in places}
    return TWO if len(storages) > 1 else ONE if len(parameters) == 1 else ALIASED


def _advise(module: nn.Module, now: str) -> str:
    """Say what to do about a change, and about a config that says otherwise (ours is frozen)."""
    gpt = next((part for part in module.modules() if isinstance(part, GPT)), None)
    claim = getattr(getattr(gpt or unwrap(module), "config", None), TIE_KEY, None)
    if now == ALIASED or claim is not (now == TWO):
        return ADVICE[now]
    config = f"; if this is meant, set config.{TIE_KEY}={not claim} so that files say so"
    return ADVICE[now] + (config if gpt is None else OWN)


def _find_changes(
    before: Slots, after: Slots, module: nn.Module
) -> Iterator[tuple[str, tuple[str, ...], str, str]]:
    """Yield kind, names, text and advice for each group of names, old or new, that changed."""
    groups = _group_names(before)
    joined = [tuple(name for name in group if name in before) for group in _group_names(after)]
    groups += [g for g in joined if g and _describe_state(before, [[name] for name in g]) == TWO]
    for names in groups:
        places = {name: _find_places(name, before, after) for name in names}
        was = _describe_state(before, [[name] for name in names])
        now = _describe_state(after, list(places.values()))
        called = f"{' and '.join((*names[1:], names[0]))} {before[names[0]].shape}"
        if now == TWO:
            became = ", ".join(_tell_places(places, before, after))
            advice, text = _advise(module, TWO), f"{called} were one matrix and are not: {became}"
            if "modules_to_save" in became:
                advice = "the adapter trains a copy of its own: give PEFT ensure_weight_tying=True"
            elif not all(places.values()):
                advice = f"if the head should predict tokens, put one back: {AGAIN}"
            yield KINDS[now], names, text, advice
        elif now != was:
            yield KINDS[now], names, f"{called} were {was} and are {now}", _advise(module, now)


def _tell_places(places: dict[str, list[str]], before: Slots, after: Slots) -> Iterator[str]:
    """Say what became of each name of a matrix that is several now."""
    for name, place in places.items():
        if not place:
            yield f"{name} is gone"
        elif name not in after:
            yield f"in the place of {name} is {' and '.join(place)}"
        elif after[name].storage != before[name].storage:
            yield f"{name} is another matrix now, {after[name].shape}"


class _Tracer:
    """The one trace function of a thread, for all guards that are active there.

    The first guard installs it; the last one puts back what was there before (a debugger's, a
    coverage tool's), which is called on meanwhile. Guards may end in any order, as tasks of asyncio
    do. If something else has replaced it, it is left alone: the next guard gets another.
    """

    def __init__(self) -> None:
        self.guards: tuple[Guard, ...] = ()
        self._before: Any = sys.gettrace()
        self._frames: dict[FrameType, Trace | None] = {}

    @classmethod
    def of_this_thread(cls) -> _Tracer:
        """Return the one that is installed, or a new one."""
        tracer = getattr(sys.gettrace(), "__self__", None)
        return tracer if isinstance(tracer, cls) and tracer.guards else cls()

    def remove(self, guard: Guard, frame: FrameType | None) -> None:
        """Let a guard see no more; after the last one, all is as it was before the first."""
        self.guards = tuple(other for other in self.guards if other is not guard)
        if not self.guards:
            if sys.gettrace() in (None, self._on_call):
                sys.settrace(self._before)
            for known, before in self._frames.items():
                known.f_trace = before
            self._frames.clear()
        elif sys.gettrace() is None:  # Python dropped it because a guard raised
            self.install(frame)

    def install(self, frame: FrameType | None) -> None:
        """Trace new frames, and those of user code that are running and not traced yet."""
        first = not self._frames
        while frame is not None:
            if _is_users(frame.f_code.co_filename) and (first or frame.f_trace is None):
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
        code, module = frame.f_code, str(frame.f_globals.get("__name__"))
        # A dataclass of ours has an __init__ from "<string>", a namedtuple its __new__.
        if _is_users(code.co_filename) and not module.startswith(("tiedgpt.", "namedtuple_")):
            for guard in self.guards:
                guard.before_line(frame)
            return self._trace_lines(inner)
        if code.co_name in CHANGERS and code.co_filename == MODULE_FILE:
            for guard in self.guards:
                guard.changed = True
        return inner

    def _trace_lines(self, inner: Trace | None) -> Trace:
        """Return the trace function of one frame of user code, which calls `inner` on."""

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal inner
            if inner is not None:
                inner = inner(frame, event, arg)
            for guard in self.guards:
                if event == "line":
                    guard.before_line(frame)
                elif event == "return":
                    guard.step(_user_frame(frame.f_back))
            return trace if self.guards else inner

        return trace


@cache
def _is_users(file: str) -> bool:
    """Whether a file holds user code, not Python's, an installed package's, torch's or ours."""
    installed = {"site-packages", "dist-packages"} & set(Path(file).parts)
    return not installed and not file.startswith((*LIBRARIES, *GENERATED))


def _user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the frame, or the nearest of its callers, that runs user code."""
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame
