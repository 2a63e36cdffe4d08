"""Steps of a few shapes against the model on whole sequences, and what becomes of captured ones."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tiedgpt import GPT, GPTConfig
from tiedgpt.infer import Engine, static_decode
from tiedgpt.infer.static_decode import StaticDecode, StepWarning, size_for
from tiedgpt.infer.torch_session import TorchRunner, TorchSession

CONFIG = {"vocab_size": 97, "n_positions": 40, "n_embd": 32, "n_layer": 2, "n_head": 4}
KINDS = {
    "GPT-2": {},
    "banded": {"attention_windows": (0, 5)},
    "GPT-1": {"norm": "post", "activation_function": "gelu"},
    "untied": {"tie_word_embeddings": False},
    "no biases": {"bias": False},
}
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]


class Tape(TorchDispatchMode):
    """Notes every kernel that is called, with the tensors that it reads and writes."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, kernel, types, args=(), kwargs=None):
        made = kernel(*args, **(kwargs or {}))
        self.calls.append((kernel, args, kwargs or {}, made))
        return made


class Kernels:
    """Stands in for CUDA graphs: repeats a step's kernels in the same memory, and no Python."""

    def __init__(self):
        self.captured, self.replayed, self.names = 0, 0, set()

    def __call__(self, step):
        step()
        self.captured += 1
        with Tape() as tape:
            step()
        calls = [call for call in tape.calls if not call[0].is_view]
        self.names = {kernel.overloadpacket.__name__ for kernel, *_ in calls}

        def replay():
            self.replayed += 1
            for kernel, args, kwargs, made in calls:
                again = kernel(*args, **kwargs)
                if isinstance(made, torch.Tensor) and again is not made:
                    made.copy_(again)
                elif isinstance(made, tuple):
                    for old, new in zip(made, again, strict=True):
                        old.copy_(new)

        return replay


@pytest.fixture(autouse=True)
def short_spans(monkeypatch):
    """Let spans be 4, 6, 8, 12, ... positions."""
    monkeypatch.setattr(static_decode, "MIN_SPAN", 4)


def strong(device="cpu", **more):
    """Return a model whose weights are large enough that mistakes show."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**CONFIG, **more)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model.to(device)


def session_of(model, slots=2, capacity=40, capture=None):
    static = StaticDecode(model, rows=slots, capacity=capacity, capture=capture)
    return TorchSession(model, static.cache, slots, capacity, static)


def last_logits(model, ids):
    with torch.no_grad():
        device = model.wte.weight.device
        return model(torch.tensor([ids], device=device))[0, -1].float().cpu().numpy()


def decode(model, session, ids, held=(5,)):
    """Read ids in slot 0, one at a time, after those that it holds; compare each."""
    held = list(held)
    if session.lengths[0] == 0:
        session.read([0], [held])
    for id in ids:
        held.append(id)
        (scores,) = session.read([0], [[id]])
        np.testing.assert_allclose(scores.logits[0], last_logits(model, held), atol=2e-5)
    return held


def test_sizes_are_powers_of_two_and_half_as_much_again():
    assert sorted({size_for(n, 1, 50) for n in range(1, 51)}) == [
        1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 50,
    ]  # fmt: skip
    assert sorted({size_for(n, 128, 1000) for n in range(1, 1001)}) == [
        128, 192, 256, 384, 512, 768, 1000,
    ]  # fmt: skip
    assert all(n <= size_for(n, 4, 999) <= max(4, 1.5 * n + 1) for n in range(1, 999))
    assert size_for(3, 128, 40) == 40


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("few_rows", [1, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_any_steps_reads_cuts_and_copies_score_as_the_whole_sequence_does(
    kind, few_rows, device, monkeypatch
):
    monkeypatch.setattr(static_decode, "FEW_ROWS", few_rows)
    model = strong(device, **KINDS[kind])
    session = TorchRunner(model, decode="static").session(slots=6, capacity=39)
    held, dice = [[] for _ in range(6)], random.Random(few_rows)
    for _ in range(150):
        what = dice.random()
        if what < 0.1:
            slot = dice.randrange(6)
            del held[slot][dice.randint(0, len(held[slot])) :]
            session.cut(slot, len(held[slot]))
        elif what < 0.15:
            source, target = dice.sample(range(6), 2)
            session.copy(source, target)
            held[target] = list(held[source])
        elif slots := [s for s in dice.sample(range(6), dice.randint(1, 6)) if len(held[s]) < 39]:
            longest = min(39 - len(held[slot]) for slot in slots)
            n = min(longest, dice.choice([1, 1, 1, 1, 4, 20]))
            ids = [[dice.randrange(97) for _ in range(n)] for _ in slots]
            every = dice.random() < 0.3
            for slot, new, got in zip(
                slots, ids, session.read(slots, ids, every=every, states=True), strict=True
            ):
                held[slot] += new
                n = len(new) if every else 1
                with torch.no_grad():
                    h = model.body(torch.tensor([held[slot]], device=device))[0, -n:]
                    logits = model.logits(h)
                np.testing.assert_allclose(got.logits, logits.cpu().numpy(), atol=5e-5)
                np.testing.assert_allclose(got.states, h.cpu().numpy(), atol=5e-5)
        assert session.lengths == [len(ids) for ids in held]
    assert max(map(len, held)) > 24, "several spans, and the end, were come to"


@pytest.mark.parametrize("device", DEVICES)
def test_a_sequence_at_its_end_is_unharmed_by_what_its_neighbours_read(device):
    model = strong(device)
    session = session_of(model, slots=3, capacity=8)
    session.read([0, 1], [[1, 2, 3, 4, 5, 6, 7], [9]])
    (full,) = session.read([0], [[8]])
    np.testing.assert_allclose(full.logits[0], last_logits(model, range(1, 9)), atol=5e-5)
    session.read([1], [[10]])  # row 0 has no room left, row 2 holds nothing
    session.cut(0, 7)
    (again,) = session.read([0], [[8]])
    np.testing.assert_array_equal(again.logits, full.logits)
    assert session.lengths == [8, 2, 0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "within"), [(torch.bfloat16, 0.2), (torch.float16, 0.03)])
def test_narrow_types_score_as_where_shapes_follow_the_lengths(dtype, within, device):
    model = strong(device).to(dtype)
    prompts = [[5, 6, 7], [1], [9] * 11]
    found = []
    for way in ("static", "ragged"):
        session = TorchRunner(model, decode=way).session(slots=3, capacity=40)
        session.read([0, 1, 2], prompts)
        found.append([session.read([2, 0, 1], [[i], [i + 1], [i + 2]]) for i in range(4)])
    for ours, theirs in zip(*found, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.logits.dtype == np.float32
            np.testing.assert_allclose(a.logits, b.logits, atol=within)


def test_an_engine_says_the_same_either_way():
    model = strong()
    prompts = [[1, 2, 3], [4], list(range(20)), [7, 8]]
    texts = []
    for way in ("static", "ragged"):
        engine = Engine(model)
        engine.runner = TorchRunner(model, decode=way)
        made = engine.generate(prompts, max_new_tokens=15, temperature=0, batch_size=3)
        texts.append([completion.ids for completion in made])
    assert texts[0] == texts[1]


def test_on_a_cpu_shapes_follow_the_lengths_unless_asked():
    assert TorchRunner(strong()).session(slots=1, capacity=8)._static is None


def test_each_shape_is_captured_once_and_no_kernel_of_it_waits_for_the_host():
    model, kernels = strong(attention_windows=(0, 5)), Kernels()
    session = session_of(model, capture=kernels)
    decode(model, session, range(10, 27))
    assert (kernels.captured, kernels.replayed) == (6, 18)  # spans 4, 6, 8, 12, 16, 24
    assert {"scatter_", "embedding", "copy_"} < kernels.names
    assert not kernels.names & {"_local_scalar_dense", "nonzero", "lift_fresh", "_to_copy", "index"}
    session.cut(0, 0)
    decode(model, session, range(3))
    assert kernels.captured == 6


def untie(model):
    model.head = nn.Linear(32, 97, bias=False)


def replace_mlp(model):
    model.h[1].mlp = strong(activation_function="relu").h[0].mlp


def move(model):
    model.wte.weight.data = model.wte.weight.data.flip(0).clone()


def assign(model):
    model.load_state_dict({k: v + 0.1 for k, v in model.state_dict().items()}, assign=True)


def change_activation(model):
    model.h[0].mlp.activation = torch.tanh


def narrow_a_window(model):
    model.h[0].attn.window = 2


@pytest.mark.parametrize(
    "change", [untie, replace_mlp, move, assign, change_activation, narrow_a_window]
)
@pytest.mark.parametrize("when", ["in a session", "between sessions"])
def test_a_model_that_is_changed_is_captured_anew(change, when):
    model, kernels = strong(), Kernels()
    session = session_of(model, capture=kernels)
    held = decode(model, session, [1, 2])
    change(model)
    session._static.renew()
    if when == "in a session":
        session.read([0], [held])
    decode(model, session, [3], held if when == "in a session" else (5,))
    assert kernels.captured == 2


def test_weights_that_change_in_place_need_no_new_capture():
    model, kernels = strong(), Kernels()
    session = session_of(model, capture=kernels)
    decode(model, session, [1, 2])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    session.cut(0, 0)
    decode(model, session, [1, 2])
    assert kernels.captured == 1


class Louder(nn.Module):
    """Somebody's adapter, which counts how often it is called."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, x):
        self.calls += 1
        return self.calls * self.inner(x)


def test_a_module_of_somebody_elses_is_called_at_every_step():
    model, kernels = strong(), Kernels()
    model.h[0].mlp = Louder(model.h[0].mlp)
    session = session_of(model, capture=kernels)
    with pytest.warns(StepWarning, match=r"h\.0\.mlp \(Louder\) is a module of tests"):
        session.read([0], [[1]])
    session.read([0], [[2]])
    assert model.h[0].mlp.calls == 2
    assert kernels.captured == 0


def test_a_hook_is_called_from_when_it_is_there():
    model, kernels = strong(), Kernels()
    session = session_of(model, capture=kernels)
    held, seen = decode(model, session, [1, 2]), []
    hook = model.h[1].register_forward_hook(lambda *given: seen.append(given))
    with pytest.warns(StepWarning, match=r"h\.1 \(Block\) has forward hooks"):
        (scores,) = session.read([0], [[3]])
    assert len(seen) == 1
    session.read([0], [[4]])
    assert len(seen) == 2
    hook.remove()
    np.testing.assert_allclose(scores.logits[0], last_logits(model, [*held, 3]), atol=2e-5)
    session._static.renew()
    decode(model, session, [1, 2])
    assert kernels.captured == 2, "without it, steps are captured again"


def test_what_torch_does_not_capture_is_computed_as_it_is_with_one_warning():
    def refuse(step):
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    model = strong()
    session = session_of(model, capture=refuse)
    session.read([0], [[5, 6]])
    with pytest.warns(StepWarning, match="not as a repeated step: .* operation not permitted$"):
        (scores,) = session.read([0], [[1]])
    np.testing.assert_allclose(scores.logits[0], last_logits(model, [5, 6, 1]), atol=2e-5)
    decode(model, session, [2, 3], [5, 6, 1])
    assert session.lengths == [5, 0]


def test_a_model_that_never_stays_the_same_is_not_repeated():
    model = strong()

    def restless(step):
        def replay():
            step()
            model.h[0].n_steps = object()

        return replay

    session = session_of(model, capture=restless)
    with pytest.warns(StepWarning, match="change whenever they compute"):
        (scores,) = session.read([0], [[1]])
    np.testing.assert_allclose(scores.logits[0], last_logits(model, [1]), atol=2e-5)


def test_sessions_in_turn_share_a_cache_and_what_is_captured():
    model = strong()
    runner = TorchRunner(model, decode="static")
    first = runner.session(slots=3, capacity=20)
    decode(model, first, range(10))
    static, other = first._static, runner.session(slots=1, capacity=8)
    assert other._static is not static
    del other, first
    again = runner.session(slots=2, capacity=17)
    assert again._static is static
    assert (again.slots, again.capacity, again.lengths) == (2, 17, [0, 0])
    steps = dict(static._steps)
    decode(model, again, range(4))
    assert static._steps == steps
    del again
    more = runner.session(slots=4, capacity=17)
    assert more._static is not static and more.lengths == [0, 0, 0, 0]
    del more
    model.to(torch.bfloat16)
    assert runner.session(slots=1, capacity=4)._cache.keys.dtype == torch.bfloat16


def test_what_a_broken_sequence_left_does_not_reach_the_next_session():
    model = strong()
    runner = TorchRunner(model, decode="static")
    with torch.inference_mode():
        session = runner.session(slots=1, capacity=20)
        session._cache.keys.fill_(torch.nan)
        session._cache.values.fill_(torch.inf)
    del session
    decode(model, runner.session(slots=1, capacity=20), range(4))


@pytest.mark.parametrize("way", ["static", "ragged"])
def test_what_a_broken_sequence_left_does_not_reach_the_next_in_its_slot(way):
    model = strong()
    session = TorchRunner(model, decode=way).session(slots=2, capacity=20)
    session.read([0], [list(range(9))])
    with torch.inference_mode():
        session._cache.keys[:, 0, :, :9] = torch.nan
        session._cache.values[:, 0, :, :9] = torch.inf
    session.cut(0, 0)
    session.read([1], [[1, 2, 3, 4]])
    session.read([0], [[1]])
    for scores in session.read([0, 1], [[2], [3]]):
        assert np.isfinite(scores.logits).all()


def test_a_mode_is_no_change_and_is_left_as_it_was():
    model, kernels = strong(), Kernels()
    model.train()
    session = session_of(model, capture=kernels)
    for id in (1, 2):
        session.read([0], [[id]])
        assert all(module.training for module in model.modules())
    assert kernels.captured == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_replays_what_it_captured():
    model = strong("cuda")
    session = TorchRunner(model).session(slots=2, capacity=40)
    held = decode(model, session, range(10, 40))
    shapes = list(session._static._steps)
    assert session._static.refused is None and {size for size, _ in shapes} == {1}
    session.cut(0, 4)
    decode(model, session, range(5), held[:4])
    assert list(session._static._steps) == shapes


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_step_that_waits_for_the_host_is_not_captured_and_computed_all_the_same():
    model = strong("cuda")
    model.h[0].mlp.activation = lambda z: z * float(z.abs().max().item() > 0)
    session = TorchRunner(model).session(slots=1, capacity=40)
    stream = torch.cuda.current_stream()
    session.read([0], [[5, 6]])
    with pytest.warns(StepWarning, match="torch does not capture it"):
        session.read([0], [[7]])
    assert torch.cuda.current_stream() == stream
    decode(model, session, range(3), [5, 6, 7])
