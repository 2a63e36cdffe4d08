"""`model.loss` is `F.cross_entropy(model(ids))` in every composition that PyTorch allows.

Each composition is a function (model, loss) -> scalar to differentiate, where `loss(ids, targets)`
is either the model's own loss or the plain one. All parameters' gradients must be equal, in float64
to 1e-9. The same list runs with the fast training path switched on, in its dtype.
"""

import copy
import gc
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, grad_and_value, jvp, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from tests.models import kept_for_backward, random_gpt
from tiedgpt import GPT, GPTConfig
from tiedgpt.core import loss as loss_module
from tiedgpt.core.embedding import TiedEmbedding
from tiedgpt.core.loss import chunked_cross_entropy
from tiedgpt.errors import UserError
from tiedgpt.train import fast_training
from tiedgpt.train.step.fast import loss as fast_loss_module
from tiedgpt.train.step.fast.loss import one_pass_cross_entropy

CONFIG = GPTConfig(
    vocab_size=53, n_positions=16, n_embd=14, n_layer=2, n_head=2,
    embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
)  # fmt: skip


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of at most 7 rows, so that tiny inputs take several."""
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 7 * 8 * 53)
    monkeypatch.setattr(fast_loss_module, "CACHED_BYTES", 120)


def drawn_model() -> GPT:
    return random_gpt(11, **vars(CONFIG)).train().double()


@pytest.fixture(params=[nullcontext, fast_training], ids=["plain", "fast"])
def model(request):
    """A model with its own loss, and one whose training is fast, with the loss in one pass."""
    model = drawn_model()
    with request.param(model):
        yield model


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(53, (3, 16), generator=draw)
    targets = torch.randint(53, (3, 16), generator=draw)
    targets[torch.rand(3, 16, generator=draw) < 0.2] = -100
    return ids, targets


A, B = batch(1), batch(2)


def own(model):
    return model.loss


def plain(model):
    def loss(ids, targets):
        return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())

    return loss


class Doubling(nn.Module):
    """A parametrization that changes the value."""

    def forward(self, weight):
        return 2 * weight - 0.1


class Adapted(nn.Module):
    """W + P Q on both sides, like an adapter on the embedding."""

    def __init__(self, base: TiedEmbedding) -> None:
        super().__init__()
        self.base = base
        self.p = nn.Parameter(torch.randn(53, 2, dtype=torch.float64) / 4)
        self.q = nn.Parameter(torch.randn(2, 14, dtype=torch.float64) / 4)

    @property
    def weight(self):
        return self.base.weight

    def forward(self, ids):
        return self.base(ids) + F.embedding(ids, self.p) @ self.q

    def unembed(self, h):
        return self.base.unembed(h) + h @ self.q.T @ self.p.T


def frozen_w(model):
    model.wte.weight.requires_grad_(False)


def only_w(model):
    model.requires_grad_(False)
    model.wte.weight.requires_grad_(True)


def hooked(model):
    model.wte.register_forward_hook(lambda module, given, out: out * 1.5)
    model.h[0].register_forward_hook(lambda module, given, out: out + 0.25)
    model.ln_f.register_forward_hook(lambda module, given, out: out.tanh())


def parametrized(model):
    parametrize.register_parametrization(model.wte, "weight", Doubling())


def adapted(model):
    torch.manual_seed(3)
    model.wte = Adapted(model.wte)


def untied(model):
    torch.manual_seed(3)
    model.head = nn.Linear(14, 53, bias=False).double()


def untied_and_hooked(model):
    untied(model)
    model.head.register_forward_hook(lambda module, given, out: out.tanh() * 3)


def any_head(model):
    torch.manual_seed(3)
    model.head = nn.Sequential(nn.Linear(14, 8), nn.Tanh(), nn.Linear(8, 53)).double()


def head_with_a_buffer_as_bias(model):
    untied(model)
    del model.head.bias
    model.head.register_buffer("bias", torch.linspace(-1, 1, 53, dtype=torch.float64))


def head_with_a_backward_hook(model):
    untied(model)
    model.head.register_full_backward_pre_hook(lambda module, given: (3 * given[0],))


class Louder(GPT):
    """A module that computes the logits itself."""

    def logits(self, h):
        return 2 * super().logits(h)


def other_logits(model):
    model.__class__ = Louder


def head_with_an_alias(model):
    model.head = nn.Linear(14, 53, bias=False)
    model.head.weight = model.wte.weight


def checkpointed_blocks(model):
    for block in model.h:
        run = block.forward
        block.forward = lambda *given, run=run: checkpoint(run, *given, use_reentrant=False)


CHANGES = {
    change.__name__: change
    for change in (
        frozen_w, only_w, hooked, parametrized, adapted, untied, untied_and_hooked, any_head,
        head_with_a_buffer_as_bias, head_with_a_backward_hook, other_logits,
        head_with_an_alias, checkpointed_blocks,
    )
} | {"as it is": lambda model: None}  # fmt: skip


def one(model, loss):
    return loss(*A)


def weighted_difference(model, loss):
    return 0.7 * loss(*A) - 0.2 * loss(*B)


def l2_on_w(model, loss):
    return loss(*A) + 0.01 * model.wte.weight.square().sum()


def z_loss(model, loss):
    return loss(*A) + 0.01 * model(B[0]).logsumexp(-1).square().mean()


def feature_loss(model, loss):
    return model.body(A[0]).square().mean() + loss(*A)


def only_reading(model, loss):
    return model.body(A[0])[:, 3].square().mean() + 0 * loss(*A)


def same_batch_twice(model, loss):
    return loss(*A) * loss(*A)


def beside_a_masked_micro_batch(model, loss):
    empty = loss(A[0], torch.full_like(A[1], -100))
    return loss(*B) + torch.where(empty.isnan(), 0.0, empty)


COMPOSITIONS = (
    one, weighted_difference, l2_on_w, z_loss, feature_loss, only_reading, same_batch_twice,
)  # fmt: skip


def gradients(model, value) -> dict[str, torch.Tensor]:
    model.zero_grad()
    value.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(ours, theirs, tolerance=1e-9):
    assert ours.keys() == theirs.keys()
    for name in ours:
        size = theirs[name].norm().clamp_min(1e-12)
        assert (ours[name] - theirs[name]).norm() <= tolerance * size, name


@pytest.mark.parametrize("composition", COMPOSITIONS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("change", CHANGES)
def test_every_gradient_equals_the_plain_models(model, change, composition):
    CHANGES[change](model)
    theirs = composition(model, plain(model))
    ours = composition(model, own(model))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert_equal(gradients(model, ours), gradients(model, theirs))


def test_a_fully_masked_micro_batch_is_nan_as_in_torch_and_counts_nothing(model):
    masked = torch.full_like(A[1], -100)
    assert model.loss(A[0], masked).isnan()
    ours, theirs = (beside_a_masked_micro_batch(model, way(model)) for way in (own, plain))
    torch.testing.assert_close(ours, theirs)


def test_gradients_accumulate_over_backward_passes(model):
    theirs = gradients(model, (plain(model)(*A) + plain(model)(*B)) / 2)
    model.zero_grad()
    for part in (A, B):
        (model.loss(*part) / 2).backward()
    ours = {name: p.grad for name, p in model.named_parameters()}
    assert_equal(ours, theirs)


@pytest.mark.parametrize("head", ["as it is", "untied"])
def test_autograd_grad_of_some_inputs_and_a_retained_graph_work(model, head):
    CHANGES[head](model)
    predicting = model.wte.weight if model.head is None else model.head.weight
    inputs = [predicting, model.h[0].attn.c_attn.weight]
    loss = model.loss(*A)
    theirs = torch.autograd.grad(plain(model)(*A), inputs)
    for _ in range(3):
        ours = torch.autograd.grad(loss, inputs, retain_graph=True)
        for mine, its in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-9, atol=1e-12)
            mine.mul_(7)  # whoever asks for a gradient may change it
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(predicting.grad, 2 * theirs[0], rtol=1e-9, atol=1e-12)


def chunked(h, w, targets):
    return chunked_cross_entropy(h, targets, lambda rows: F.linear(rows, w), 4)


@pytest.mark.parametrize("cross_entropy", [chunked, one_pass_cross_entropy])
def test_the_losss_derivatives_match_finite_differences(cross_entropy):
    draw = torch.Generator().manual_seed(2)
    h = torch.randn(9, 4, generator=draw, dtype=torch.float64, requires_grad=True)
    w = torch.randn(6, 4, generator=draw, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 1, -100, 5, 5, 2, -100, 3, 4])

    def loss(h, w):
        return cross_entropy(h, w, targets)

    assert torch.autograd.gradcheck(loss, (h, w), check_batched_grad=True)
    assert torch.autograd.gradgradcheck(loss, (h, w))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's
def test_a_forward_mode_derivative_equals_the_plain_models(model):
    h = model.body(A[0]).detach().flatten(0, 1)
    answers, tangent = A[1].flatten(), torch.ones_like(h)

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(h, tangent)
        losses = model.head_loss(dual, answers), F.cross_entropy(model.logits(dual), answers)
        ours, theirs = (forward_ad.unpack_dual(loss).tangent for loss in losses)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_second_order_gradients_equal_the_plain_models(model):
    """Torch's fused attention has no second derivative; its plain one has."""

    def penalty(loss):
        (first,) = torch.autograd.grad(loss, [model.wte.weight], create_graph=True)
        return first.square().sum() + 0.3 * loss

    with sdpa_kernel(SDPBackend.MATH):
        ours, theirs = (gradients(model, penalty(way(model)(*A))) for way in (own, plain))
    assert_equal(ours, theirs)


def loss_of(model, parameters, ids, targets):
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids, targets):
            return self.model.loss(ids, targets)

    named = {f"model.{name}": tensor for name, tensor in parameters.items()}
    return functional_call(Loss(), named, (ids, targets))


@pytest.mark.parametrize("head", ["as it is", "untied", "any_head", "adapted"])
def test_torch_func_grad_equals_the_plain_models_gradients(model, head):
    CHANGES[head](model)
    theirs = gradients(model, plain(model)(*A))
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    ours = grad(lambda p: loss_of(model, p, *A))(parameters)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("head", ["as it is", "untied", "any_head", "adapted"])
def test_torch_func_jvp_equals_the_plain_models_derivative(model, head):
    CHANGES[head](model)
    with sdpa_kernel(SDPBackend.MATH):
        slopes = gradients(model, plain(model)(*A))
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        directions = {name: torch.randn_like(p) for name, p in parameters.items()}
        value, along = jvp(lambda p: loss_of(model, p, *A), (parameters,), (directions,))
    torch.testing.assert_close(value, plain(model)(*A).detach(), rtol=1e-12, atol=1e-12)
    expected = sum((slopes[name] * directions[name]).sum() for name in slopes)
    torch.testing.assert_close(along, expected, rtol=1e-9, atol=1e-12)


def test_a_loss_that_torch_func_does_not_differentiate_is_a_constant(model):
    slope, value = grad_and_value(lambda x: x.square() + model.loss(*A))(torch.tensor(3.0))
    assert float(slope) == 6
    torch.testing.assert_close(value, 9 + plain(model)(*A).detach())


def test_a_matrix_changed_before_the_backward_pass_is_torchs_error(model):
    loss = model.loss(*A)
    with torch.no_grad():
        model.wte.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


NO_BATCHING_RULE = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
"""Torch's own warning about its attention on CPUs."""


@NO_BATCHING_RULE
def test_vmap_of_grad_gives_each_examples_gradient(model):
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def one_example(parameters, ids, targets):
        return loss_of(model, parameters, ids[None], targets[None])

    ours = vmap(grad(one_example), in_dims=(None, 0, 0))(parameters, *A)
    for row in range(3):
        theirs = gradients(model, plain(model)(A[0][row : row + 1], A[1][row : row + 1]))
        assert_equal({name: g[row] for name, g in ours.items()}, theirs)


@NO_BATCHING_RULE
def test_an_ensemble_of_models_runs_in_one_vmap(model):
    models = [copy.deepcopy(model) for _ in range(3)]
    for other in models:
        with torch.no_grad():
            other.wte.weight.mul_(1 + torch.rand(1, dtype=torch.float64))
    parameters, _ = stack_module_state(models)
    losses = vmap(lambda p: loss_of(model, p, *A))(parameters)
    for mine, other in zip(losses, models, strict=True):
        torch.testing.assert_close(mine, plain(other)(*A).detach(), rtol=1e-12, atol=1e-12)


@NO_BATCHING_RULE
@pytest.mark.parametrize("head", ["as it is", "untied", "any_head", "adapted"])
def test_a_backward_pass_through_vmap_is_exact(model, head):
    CHANGES[head](model)

    def losses(way):
        one = vmap(lambda ids, targets: way(model)(ids[None], targets[None]))
        return one(*A).sum()

    theirs = sum(plain(model)(A[0][row : row + 1], A[1][row : row + 1]) for row in range(3))
    assert_equal(gradients(model, losses(own)), gradients(model, theirs))


def test_a_compiled_loss_and_forward_match(model):
    torch.compiler.reset()  # torch compiles a function a limited number of times
    theirs = gradients(model, plain(model)(*A))
    compiled = torch.compile(lambda ids, targets: model.loss(ids, targets), backend="aot_eager")
    assert_equal(gradients(model, compiled(*A)), theirs)
    forward = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(forward(A[0]), model(A[0]), rtol=1e-9, atol=1e-12)


def test_a_forward_of_dynamic_length_compiles_fully_and_exports(model):
    torch.compiler.reset()  # torch compiles a function a limited number of times
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    for length in (2, 5, 16):
        ids = A[0][:, :length]
        torch.testing.assert_close(compiled(ids), model(ids), rtol=1e-9, atol=1e-12)
    length = torch.export.Dim("length", min=2, max=16)
    exported = torch.export.export(model.eval(), (A[0],), dynamic_shapes=({1: length},))
    ids = A[0][:, :9]
    torch.testing.assert_close(exported.module()(ids), model(ids), rtol=1e-9, atol=1e-12)


def test_a_forward_works_on_the_meta_device_and_with_fake_tensors(model):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.device("meta"):
        empty = GPT(CONFIG)
        ids = torch.zeros(2, 9, dtype=torch.long)
    assert empty(ids).shape == (2, 9, 53)
    assert empty.loss(ids, ids).shape == ()
    with FakeTensorMode():
        fake = GPT(CONFIG)
        ids = torch.zeros(2, 9, dtype=torch.long)
        assert fake(ids).shape == (2, 9, 53)
        fake.loss(ids, ids).backward()
        assert fake.wte.weight.grad.shape == (53, 14)


def test_a_block_checkpointed_by_the_user_saves_only_its_input(model):
    x = torch.randn(3, 16, 14, dtype=torch.float64, requires_grad=True)
    block = model.h[0]
    assert (
        kept_for_backward(block, lambda: checkpoint(block, x, 0, use_reentrant=False)) <= x.nbytes
    )
    assert kept_for_backward(block, lambda: block(x, 0)) > 5 * x.nbytes


def test_an_offloaded_matrix_is_refused_and_never_read(model):
    accelerate = pytest.importorskip("accelerate")
    offloaded = accelerate.cpu_offload(model, execution_device="cpu")
    for call in (lambda: offloaded(A[0]), lambda: offloaded.loss(*A)):
        with pytest.raises(UserError, match="offloaded"):
            call()


def test_the_loss_works_through_ddps_forward(model):
    """Run `loss` in place of `forward` once, as frameworks that mark methods do."""
    theirs = gradients(model, plain(model)(*A))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    wrapped = None
    try:
        wrapped = DistributedDataParallel(model)

        def marked(*batch):
            del model.forward
            return model.loss(*batch)

        model.forward = marked
        assert_equal(gradients(model, wrapped(*A)), theirs)
    finally:
        del wrapped  # freed after the group, it would wait for threads that wait for Python
        gc.collect()
        dist.destroy_process_group()


def test_dropout_with_a_fixed_seed_drops_the_same(model):
    model.drop.p = 0.3
    for block in model.h:
        block.drop.p, block.attn.attn_pdrop = 0.2, 0.1
    found = []
    for way in (own, plain):
        torch.manual_seed(5)
        found.append(gradients(model, way(model)(*A)))
    assert_equal(*found)


def packed(lengths, seed):
    draw = torch.Generator().manual_seed(seed)
    starts = torch.cat([torch.full((n,), sum(lengths[:i])) for i, n in enumerate(lengths)])
    ids = torch.randint(53, (1, sum(lengths)), generator=draw)
    return ids, torch.randint(53, ids.shape, generator=draw), starts[None]


@pytest.mark.parametrize("windows", [None, (0, 3)])
def test_packed_documents_give_the_results_of_separate_ones(model, windows):
    if windows:
        banded = GPT(GPTConfig(**{**vars(CONFIG), "attention_windows": windows})).double()
        banded.load_state_dict(model.state_dict())
        model = banded
    lengths = [5, 1, 7, 3]
    ids, targets, document_starts = packed(lengths, 9)
    h = model.body(ids, document_starts=document_starts)[0]
    parts = zip(ids[0].split(lengths), targets[0].split(lengths), h.split(lengths), strict=True)
    total = torch.zeros((), dtype=torch.float64)
    for document, answers, its in parts:
        torch.testing.assert_close(its, model.body(document[None])[0], rtol=1e-9, atol=1e-12)
        total = total + len(answers) * model.loss(document[None], answers[None])
    whole = model.loss(ids, targets, document_starts=document_starts)
    assert_equal(gradients(model, whole), gradients(model, total / sum(lengths)))


def test_changing_one_packed_document_changes_no_other(model):
    ids, _, document_starts = packed([5, 4, 7], 9)
    changed = ids.clone()
    changed[0, 5:9] = (ids[0, 5:9] + 1) % 53
    before, after = (
        model.body(ids, document_starts=document_starts)[0],
        model.body(changed, document_starts=document_starts)[0],
    )
    same = (before == after).all(1)
    assert same.tolist() == [True] * 5 + [False] * 4 + [True] * 7


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 0.03), (torch.float64, 1e-9)])
def test_under_autocast_gradients_match_and_float64_stays(model, dtype, tolerance):
    model.to(dtype)
    results = []
    for way in (own, plain):
        with torch.autocast("cpu", torch.bfloat16):
            value = way(model)(*A)
        assert value.dtype == dtype
        results.append(gradients(model, value))
    assert_equal(*results, tolerance=tolerance)


def starts_at(index):
    starts = torch.zeros(1, 16, dtype=torch.long)
    starts[0, 8] = index
    return starts


def targets_with(wrong):
    targets = A[1].clone()
    targets[0, :2] = torch.tensor([0, 52])  # the first and the last class are none
    targets[1, 3] = wrong
    return targets


ROW = A[0][:1], A[1][:1]


@pytest.mark.parametrize(
    ("ids", "targets", "document_starts", "says"),
    [
        (A[0][:0], A[1][:0], None, "at least one token"),
        (A[0][:, :0], A[1][:, :0], None, "1 to 16 tokens"),
        (*A[:1], A[1].double(), None, "targets must be integers"),
        (*A[:1], A[1] > 0, None, "targets must be integers"),
        (*A[:1], A[1][:, 1:], None, "must have one shape"),
        *(
            (A[0], targets_with(wrong), None, f"between 0 and 52, .* got {wrong}")
            for wrong in (53, -1, -99)
        ),
        (*ROW, torch.zeros(1, 15).long(), "document_starts must hold an index"),
        (*ROW, torch.zeros(1, 16), "document_starts must hold an index"),
        (*ROW, torch.zeros(1, 16).bool(), "document_starts must hold an index"),
        *((*ROW, starts_at(index), "an index from 0 to its own") for index in (-1, -20, 9, 10**6)),
    ],
)
def test_mismatched_ids_targets_and_document_starts_are_refused(
    model, ids, targets, document_starts, says
):
    with pytest.raises(UserError, match=says):
        model.loss(ids, targets, document_starts=document_starts)
