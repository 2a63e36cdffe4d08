"""Report the line of user code after which two parameters that were one are two, or the reverse.

    with guard(model) as watch:
        model.load_state_dict(state, assign=True)     # TieWarning: train.py:12: ...
    watch.events                                      # what happened, where, and what to do

`sys.settrace` calls the guard before each line of user code (not of torch, site-packages or the
standard library) and when a function returns. The guard then compares the objects and addresses of
the few parameters that are shared or have an embedding's shape, and all parameters after a call
into `nn.Module` that can replace one. A change is attributed to the line that ran last.

A guard watches the thread it was entered in. A change made by another thread is noticed before this
thread's next line and attributed to its last one.
"""

from __future__ import annotations

import inspect
import linecache
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
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

TIE_AGAIN = "tie(model) makes them one again"
KINDS = {
    "one Parameter": (
        "joined",
        "an optimizer made before this holds the one that is gone: make a new one",
    ),
    "two Parameters over one memory": (
        "aliased",
        "an optimizer made now would step it twice, and the next copy or move parts them "
        "(load_state_dict(assign=True) does this); tie(model) makes them one Parameter",
    ),
    "two matrices": ("split", TIE_AGAIN),
}
"""State of two names after a change: the kind of the event, and the advice."""
ONE, ALIASED, TWO = KINDS
CHANGERS = frozenset(
    "__setattr__ __delattr__ __setstate__ _apply register_parameter register_module "
    "add_module".split()
)
"""Functions of nn.Module that can replace a parameter."""
MODULE_FILE = inspect.getfile(nn.Module)
HOMES = (sysconfig.get_path("stdlib"), *torch.__path__, str(Path(__file__).parents[1]))
NOT_USER_CODE = (
    *(f"{path}/" for home in HOMES for path in (home, Path(home).resolve())),
    "<frozen",
    "<eval_with_key",
    "<attrs",
    "<__",
    "<torch",
)
"""First parts of the file names of libraries and of generated code."""


class TieWarning(UserWarning):
    """Two parameters that were one are two, or the reverse."""


class TieBrokenError(CheckFailedError):
    """Two parameters that were one are two, or the reverse: raised with `action="raise"`."""


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
    """The change, with the shapes."""
    advice: str
    """A remedy."""

    def __str__(self) -> str:
        code = f" `{self.code}`" if self.code else ""
        return f"{self.file}:{self.line}:{code}: {self.text}; {self.advice}"


def guard(module: nn.Module, *, action: Literal["warn", "raise"] = "warn") -> Guard:
    """Return a context manager that watches the shared parameters of any module.

    Inside `with guard(model) as watch:` every change is added to `watch.events` and either warned
    of (`TieWarning`, at the line that made it) or raised (`TieBrokenError`, before the next line
    runs; the watch ends with it). An exception of the body is never replaced.

    On GPT-2 124M and two CPU cores a line of user code costs 4 to 6 microseconds more, a line that
    sets an attribute of a module (`model.eval()`) half a millisecond, and a one-token forward, all
    of it library code, 2 to 4 %; a training step costs no more than can be measured.

    Raises `UserError` where a debugger or a coverage tool has installed a trace function.
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
        self._line = ("", 0)  # file and line that is running
        self._with: tuple[FrameType | None, int] = (None, 0)
        self._tracer: _Tracer | None = None
        self._remember()

    def __enter__(self) -> Guard:
        if self._tracer is not None:
            raise UserError("this guard is in use", hint="make another")
        tracer = _Tracer.of_this_thread()
        self._remember()
        frame = _find_user_frame(sys._getframe())
        if frame is not None:
            self._line = (frame.f_code.co_filename, frame.f_lineno)
            self._with = (frame, frame.f_lineno)
        self._tracer = tracer
        tracer.guards += (self,)
        tracer.install(frame)
        return self

    def __exit__(self, cls: object, error: object, traceback: object) -> None:
        if self._tracer is not None:
            self._tracer.remove(self, _find_user_frame(sys._getframe()))
        self._tracer, self._with = None, (None, 0)
        self._compare(may_raise=error is None)

    def step(self, frame: FrameType | None) -> None:
        """Compare the parameters if any moved, and remember the line that runs next.

        Where the `with` block ends, `__exit__` does it.
        """
        if frame is not None and self._with == (frame, frame.f_lineno):
            return
        if self.changed or self._look_up() != self._seen:
            self._compare(may_raise=True)
        if frame is not None:
            self._line = (frame.f_code.co_filename, frame.f_lineno)

    def _look_up(self) -> list[tuple[int, int]]:
        """Return the object under each watched name, found as user code does, and its address."""
        seen = []
        for path, parameter in self._watched:
            value: Any = self.module
            for name in path:
                value = getattr(value, name, None)  # None also for the `head` of a tied GPT
            try:
                address = parameter.data_ptr()
            except RuntimeError:  # sharded and wrapped tensors have no address
                address = 0
            seen.append((id(value), address))
        return seen

    def _remember(self) -> None:
        """Keep all parameters, and select those that are compared before each line."""
        self.changed, self._slots = False, _find_slots(self.module)
        tables = {m.weight.shape for m in self.module.modules() if isinstance(m, nn.Embedding)}
        shared = {name for names in _group_names(self._slots) for name in names}
        self._watched = [
            (name.split("."), slot.parameter)
            for name, slot in self._slots.items()
            if name in shared or slot.shape in tables
        ]
        self._seen = self._look_up()

    def _compare(self, *, may_raise: bool) -> None:
        """Report the differences between the parameters now and before."""
        before, (file, line) = self._slots, self._line
        self._remember()
        code = linecache.getline(file, line).strip()
        changes = _find_changes(before, self._slots, self.module)
        events = [TieEvent(file, line, code, *change) for change in changes]
        self.events += events
        if events and self.action == "raise" and may_raise:
            raise TieBrokenError("; ".join(map(str, events)))
        for event in events:
            warnings.warn_explicit(f"{event.text}; {event.advice}", TieWarning, file, line)


class _Slot(NamedTuple):
    """The parameter of a name. It is kept alive, so that its id is not used again."""

    parameter: Tensor
    storage: Storage
    shape: tuple[int, ...]
    """Its shape then: an assignment to its `data` changes that of the parameter."""


Slots = dict[str, _Slot]


def _find_slots(module: nn.Module) -> Slots:
    """Return every parameter that has a shape, by each of its names.

    `head.weight` stands for the use of W in a tied GPT, although no parameter has this name.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, child in module.named_modules():
        if isinstance(child, GPT) and child.head is None:
            parameters[f"{name}.head.weight".removeprefix(".")] = child.wte.weight
        elif isinstance(child, Unembed):
            parameters[f"{name}.weight"] = child.wte.weight
    return {
        name: _Slot(p, stored_tensor(name, p).storage, tuple(p.shape))
        for name, p in parameters.items()
        if not isinstance(p, UninitializedParameter)
    }


def _group_names(slots: Slots) -> list[list[str]]:
    """Return the names of each storage that has two or more."""
    by_storage: dict[Storage, list[str]] = {}
    for name, slot in slots.items():
        by_storage.setdefault(slot.storage, []).append(name)
    return [names for names in by_storage.values() if len(names) > 1]


def _describe_state(slots: Slots, groups: Iterable[list[str]]) -> str:
    """Return the state of several groups of names: a key of `KINDS`."""
    groups = list(groups)
    storages = {frozenset(slots[name].storage for name in group) for group in groups}
    parameters = {frozenset(id(slots[name].parameter) for name in group) for group in groups}
    return TWO if len(storages) > 1 else ONE if len(parameters) == 1 else ALIASED


def _find_changes(
    before: Slots, after: Slots, module: nn.Module
) -> Iterator[tuple[str, tuple[str, ...], str, str]]:
    """Yield kind, names, text and advice for each group of names, old or new, that changed."""
    joined = [[name for name in group if name in before] for group in _group_names(after)]
    joined = [g for g in joined if g and _describe_state(before, ([n] for n in g)) == TWO]
    for names in [*_group_names(before), *joined]:
        # In a module that was wrapped or replaced, `lm_head.weight` may have become
        # `lm_head.1.weight`, or `lm_head.modules_to_save.default.weight` beside the original.
        successors = {name: [name] for name in names}
        for name in [name for name in names if name not in after]:
            prefix, shape = f"{name.removesuffix('.weight')}.", before[name].shape
            new = [other for other in after.keys() - before.keys() if other.startswith(prefix)]
            successors[name] = [n for n in sorted(new) if after[n].shape == shape]
        was = _describe_state(before, ([name] for name in names))
        now = _describe_state(after, successors.values())
        if now == was:
            continue
        event, advice = KINDS[now]
        text = f"{' and '.join((*names[1:], names[0]))} {before[names[0]].shape}"
        became = []
        for name, others in successors.items():
            if not others:
                became.append(f"{name} is gone")
            elif name not in after:
                became.append(f"in the place of {name} is {' and '.join(others)}")
            elif after[name].storage != before[name].storage:
                became.append(f"{name} is another matrix now, {after[name].shape}")
        changed = f"were {was} and are {now}"
        if now == TWO:
            changed = f"were one matrix and are not: {', '.join(became)}"
        if now == TWO and "modules_to_save" in changed:
            advice = "the adapter trains a copy of its own: give PEFT ensure_weight_tying=True"
        elif not all(successors.values()):
            advice = f"if the head should predict tokens, put one back: {TIE_AGAIN}"
        else:
            advice += _advise(module, now)
        yield event, tuple(names), f"{text} {changed}", advice


def _advise(module: nn.Module, now: str) -> str:
    """Return how to change a config that contradicts the new state; "" if none does."""
    gpt = next((child for child in module.modules() if isinstance(child, GPT)), None)
    claim = getattr(getattr(gpt or unwrap(module), "config", None), TIE_KEY, None)
    if now == ALIASED or claim is not (now == TWO):
        return ""
    if gpt is None:
        return f"; if this is meant, set config.{TIE_KEY}={not claim} so that files say so"
    return "; if this is meant, replace_head(model, model.head) lets the config say so"


class _Tracer:
    """The trace function of a thread, for all guards that are active there.

    Guards may end in any order, as tasks of asyncio do.
    """

    def __init__(self) -> None:
        self.guards: tuple[Guard, ...] = ()

    @classmethod
    def of_this_thread(cls) -> _Tracer:
        """Return the installed tracer, or a new one; `UserError` if another tool traces."""
        installed = sys.gettrace()
        tracer = getattr(installed, "__self__", None)
        if isinstance(tracer, cls) and tracer.guards:
            return tracer
        if installed is not None and not isinstance(tracer, cls):
            raise UserError(
                "a guard needs sys.settrace, and a debugger or a coverage tool uses it",
                hint="run without it; coverage has COVERAGE_CORE=sysmon",
            )
        return cls()

    def install(self, frame: FrameType | None) -> None:
        """Trace functions that are called, and the lines of user code that is running."""
        while frame is not None:
            # A tracer whose guards ended elsewhere is still in the frames that it traced.
            is_ours = isinstance(getattr(frame.f_trace, "__self__", None), _Tracer)
            is_free = is_ours or frame.f_trace is None
            if is_free and _is_user_code(frame.f_code.co_filename):
                frame.f_trace = self._on_line
            frame = frame.f_back
        sys.settrace(self._on_call)

    def remove(self, guard: Guard, frame: FrameType | None) -> None:
        """Stop calling a guard; after the last one, stop tracing."""
        self.guards = tuple(other for other in self.guards if other is not guard)
        if self.guards:
            if sys.gettrace() is None:  # Python drops a trace function that raises
                self.install(frame)
            return
        if sys.gettrace() == self._on_call:
            sys.settrace(None)
        while frame is not None:
            if frame.f_trace == self._on_line:
                frame.f_trace = None
            frame = frame.f_back

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Trace the lines of a function that is called, if it is user code."""
        if not self.guards:  # the last guard ended in another thread
            sys.settrace(None)
            return None
        file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__"))
        # A dataclass of ours has an __init__ from "<string>", a namedtuple its __new__.
        if _is_user_code(file) and not module.startswith(("tiedgpt.", "namedtuple_")):
            return self._on_line(frame, "line", arg)
        if frame.f_code.co_name in CHANGERS and file == MODULE_FILE:
            for guard in self.guards:
                guard.changed = True
        return None

    def _on_line(self, frame: FrameType, event: str, arg: Any) -> Any:
        for guard in self.guards:
            if event == "line":
                guard.step(frame)
            elif event == "return":
                guard.step(_find_user_frame(frame.f_back))
        return self._on_line


@cache
def _is_user_code(file: str) -> bool:
    """Whether a file holds user code, not Python's, an installed package's, torch's or ours."""
    installed = {"site-packages", "dist-packages"} & set(Path(file).parts)
    return not installed and not file.startswith(NOT_USER_CODE)


def _find_user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the frame, or the nearest of its callers, that runs user code."""
    while frame is not None and not _is_user_code(frame.f_code.co_filename):
        frame = frame.f_back
    return frame
