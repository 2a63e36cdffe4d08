"""The contract: one matrix reads and predicts, and nothing that people do to models parts it.

Each test is a failure seen in a real project, where the head was a second name for the embedding.
"""

import copy
import functools
import gc
import io
import json
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.models import TINY, random_gpt
from tests.train.trials import SERVER
from tiedgpt import GPT, GPTConfig
from tiedgpt.errors import CorruptInputError
from tiedgpt.tie import audit, ledger, prune, resize_vocab, tie, untie
from tiedgpt.train.step.loss import LossModule
from tiedgpt.train.step.optim.groups import optimizers, parameter_groups
from tiedgpt.tune import freeze
from tiedgpt.weights.load import CheckpointWarning

N_TINY = 97 * 32 + 24 * 32 + 3 * (12 * 32 * 32 + 13 * 32) + 2 * 32


def assert_one_matrix(model: GPT) -> None:
    """W stands under one name, in one Parameter, and predicts."""
    vocab_size, width = model.config.vocab_size, model.config.n_embd
    names = [n for n, p in model.named_parameters() if tuple(p.shape) == (vocab_size, width)]
    assert names == ["wte.weight"]
    assert not [name for name in model.state_dict() if "head" in name]
    assert sum(p.numel() for p in model.parameters()) == model.config.parameter_count()
    h = torch.randn(2, width, dtype=model.wte.weight.dtype)
    if not model.wte.weight.is_meta:
        torch.testing.assert_close(model.logits(h), h @ model.wte.weight.T)
        ids = torch.tensor([[1, 0]])
        assert torch.equal(model.wte(ids)[0], model.wte.weight[[1, 0]])


def targets_of(ids: torch.Tensor) -> torch.Tensor:
    return ids.roll(-1, 1)


@pytest.fixture
def transformers():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers
    transformers.logging.disable_progress_bar()
    return transformers


def test_there_is_one_parameter_of_shape_v_by_d_and_no_lm_head_among_the_names(tiny):
    assert_one_matrix(tiny)
    assert not [name for name, _ in tiny.named_modules() if "head" in name]


def test_the_count_is_the_formulas_and_gpt2s_is_124_439_808(tiny):
    assert sum(p.numel() for p in tiny.parameters()) == N_TINY == tiny.config.parameter_count()
    with torch.device("meta"):
        gpt2 = GPT(GPTConfig.preset("gpt2"))
    assert sum(p.numel() for p in gpt2.parameters()) == 124_439_808
    assert gpt2.config.parameter_count() == 124_439_808
    untied = GPTConfig.preset("gpt2", tie_word_embeddings=False)
    assert untied.parameter_count() == 163_037_184


def test_a_deepcopy_is_tied_and_shares_nothing_with_the_first(tiny, ids):
    twin = copy.deepcopy(tiny)
    assert_one_matrix(twin)
    with torch.no_grad():
        twin.wte.weight[5] += 1.0
    assert not torch.equal(twin(ids)[..., 5], tiny(ids)[..., 5])
    assert_one_matrix(tiny)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_change_of_dtype_keeps_one_matrix(tiny, overwrite):
    before = tiny.wte.weight.detach().clone()
    torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
    try:
        tiny.to(torch.bfloat16)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert_one_matrix(tiny)
    assert torch.equal(tiny.wte.weight, before.to(torch.bfloat16))


def test_from_the_meta_device_through_to_empty_there_is_one_matrix(tiny, tiny_config, ids):
    with torch.device("meta"):
        model = GPT(tiny_config).eval()
    model.to_empty(device="cpu")
    assert len({p.data_ptr() for p in model.parameters()}) == len(tiny.state_dict())
    model.load_state_dict(tiny.state_dict())
    assert_one_matrix(model)
    assert torch.equal(model(ids), tiny(ids))


def test_load_state_dict_with_assign_keeps_one_matrix(tiny, tiny_config, ids):
    with torch.device("meta"):
        model = GPT(tiny_config).eval()
    missing, unexpected = model.load_state_dict(tiny.state_dict(), assign=True)
    assert not missing and not unexpected
    assert_one_matrix(model)
    assert torch.equal(model(ids), tiny(ids))


def test_the_file_holds_one_key_for_it_and_the_bytes_of_the_unique_parameters(tiny, tmp_path):
    tiny.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    assert [name for name, t in state.items() if t.shape == (97, 32)] == ["transformer.wte.weight"]
    size = (tmp_path / "model.safetensors").stat().st_size
    with (tmp_path / "model.safetensors").open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    assert size == 8 + header + 4 * N_TINY
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is True
    back = GPT.from_pretrained(tmp_path)
    assert_one_matrix(back)
    assert torch.equal(back.wte.weight, tiny.wte.weight)


def their_pair(transformers, tmp_path: Path, change: float):
    """A transformers GPT-2 whose file holds lm_head.weight too, the embedding plus `change`."""
    torch.manual_seed(0)
    special = {"bos_token_id": 1, "eos_token_id": 1}
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**TINY, **special)).eval()
    theirs.lm_head = nn.Linear(32, 97, bias=False)
    theirs.lm_head.weight.data = theirs.transformer.wte.weight.detach() + change
    theirs.config.tie_word_embeddings = False
    theirs.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('_embeddings": false', '_embeddings": true'))
    assert "lm_head.weight" in load_file(tmp_path / "model.safetensors")
    return theirs


def test_an_equal_pair_is_imported_as_one_matrix(transformers, tmp_path, ids):
    theirs = their_pair(transformers, tmp_path, 0.0)
    with pytest.warns(CheckpointWarning, match="are equal: tied"):
        ours = GPT.from_pretrained(tmp_path)
    assert_one_matrix(ours)
    torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-5, rtol=1e-5)


def test_an_unequal_pair_is_refused_with_numbers_and_kept_apart_on_request(
    transformers, tmp_path, ids
):
    theirs = their_pair(transformers, tmp_path, 0.25)
    with pytest.raises(CorruptInputError, match=r"97 of 97 rows.*0\.25"):
        GPT.from_pretrained(tmp_path)
    apart = GPT.from_pretrained(tmp_path, resolve="untie")
    torch.testing.assert_close(apart(ids), theirs(ids).logits, atol=1e-5, rtol=1e-5)
    assert apart.config.parameter_count() == N_TINY + 97 * 32
    assert_one_matrix(GPT.from_pretrained(tmp_path, resolve="keep-output"))


def test_the_gradient_of_w_is_that_of_reading_plus_that_of_predicting(tiny, ids):
    twin = copy.deepcopy(tiny)
    untie(twin)
    tiny.loss(ids, targets_of(ids)).backward()
    twin.loss(ids, targets_of(ids)).backward()
    assert twin.wte.weight.grad.norm() > 0.01 and twin.head.weight.grad.norm() > 0.01
    torch.testing.assert_close(
        tiny.wte.weight.grad, twin.wte.weight.grad + twin.head.weight.grad, atol=1e-6, rtol=1e-4
    )


@pytest.mark.parametrize("matrices", ["adamw", "muon"])
def test_w_is_in_one_optimizer_group_and_stepped_once(tiny, ids, matrices):
    groups = parameter_groups(tiny, matrices=matrices, weight_decay=0.1)
    in_groups = [p for group in groups for p in group.parameters.values()]
    assert sum(p is tiny.wte.weight for p in in_groups) == 1
    assert len({id(p) for p in in_groups}) == len(in_groups) == len(list(tiny.parameters()))
    before = tiny.wte.weight.detach().clone()
    tiny.loss(ids, targets_of(ids)).backward()
    for optimizer in optimizers(groups, lr=0.01):
        optimizer.step()
    step = (tiny.wte.weight - before).abs().max().item()
    assert step == pytest.approx(0.01, rel=1e-3)  # Adam's first step has the size of its rate


def test_a_compiled_model_is_saved_without_orig_mod_in_its_keys(tiny, ids, tmp_path):
    compiled = torch.compile(tiny, backend="eager")
    torch.testing.assert_close(compiled(ids), tiny(ids))
    compiled.save_pretrained(tmp_path)
    keys = load_file(tmp_path / "model.safetensors").keys()
    assert len(keys) == len(tiny.state_dict())
    assert not [key for key in keys if "_orig_mod" in key]
    assert_one_matrix(GPT.from_pretrained(tmp_path))
    tiny.compile(backend="eager")
    assert not [key for key in tiny.state_dict() if "_orig_mod" in key]


def test_a_pickled_model_comes_back_with_one_matrix(tiny, ids):
    back = pickle.loads(pickle.dumps(tiny))
    assert_one_matrix(back)
    assert torch.equal(back(ids), tiny(ids))
    buffer = io.BytesIO()
    torch.save(tiny.state_dict(), buffer)
    assert buffer.tell() < 4 * N_TINY + 40_000


def test_pruning_keeps_the_scores_of_the_remaining_tokens(tiny, ids):
    keep = [40, 3, 96, 0, 12]
    inside = torch.tensor(keep)[ids % 5]
    expected = tiny(inside)[..., keep]
    prune(tiny, keep)
    assert_one_matrix(tiny)
    torch.testing.assert_close(tiny(ids % 5), expected)


def test_a_frozen_matrix_is_frozen_for_reading_and_predicting(tiny, ids):
    tiny.wte.weight.requires_grad_(False)
    before = tiny.wte.weight.detach().clone()
    groups = parameter_groups(tiny, matrices="adamw", weight_decay=0.0)
    assert not [p for g in groups for p in g.parameters.values() if p.shape == (97, 32)]
    tiny.loss(ids, targets_of(ids)).backward()
    for optimizer in optimizers(groups, lr=0.1):
        optimizer.step()
    assert torch.equal(tiny.wte.weight, before) and tiny.wte.weight.grad is None
    resize_vocab(tiny, 99)
    assert not tiny.wte.weight.requires_grad
    untie(tiny)
    assert not tiny.head.weight.requires_grad


def test_with_gradient_checkpointing_the_gradients_are_the_same(tiny, ids):
    tiny.loss(ids, targets_of(ids)).backward()
    plain = {name: p.grad.clone() for name, p in tiny.named_parameters()}
    tiny.zero_grad()
    for block in tiny.h:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    tiny.loss(ids, targets_of(ids)).backward()
    for name, parameter in tiny.named_parameters():
        torch.testing.assert_close(parameter.grad, plain[name], msg=name)


def test_untying_and_tying_again_restores_the_model(tiny, tiny_config, ids):
    before = tiny(ids)
    untie(tiny)
    assert torch.equal(tiny(ids), before)
    tie(tiny)
    assert_one_matrix(tiny)
    assert tiny.config == tiny_config and torch.equal(tiny(ids), before)


# Several processes


def whole_batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(97, (4, 24), generator=torch.Generator().manual_seed(5))
    return ids, targets_of(ids)


def fresh_model() -> GPT:
    torch.manual_seed(11)
    off = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    return GPT(GPTConfig(**TINY, **off))


def step(objective: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> None:
    objective(ids, targets).backward()
    torch.optim.SGD(objective.parameters(), lr=0.1).step()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def worker(rank: int, directory: str, model: GPT) -> None:
    """One of two processes: take half the batch through DDP, then through FSDP2, and save both."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=2)
    ids, targets = (part.chunk(2)[rank] for part in whole_batch())
    names = [name for name, p in model.named_parameters() if p.shape == (97, 32)]
    results: dict[str, object] = {"received": (names, model.head is None)}
    for kind in ("ddp", "fsdp"):
        model = fresh_model()
        objective = LossModule(model)
        if kind == "fsdp":
            for block in model.h:
                fully_shard(block)
            wrapped = fully_shard(objective)
        else:
            wrapped = DistributedDataParallel(objective)
        step(wrapped, ids, targets)
        results[kind] = {
            "names": [n for n, p in model.named_parameters() if p.shape == (97, 32)],
            "gradients": {n: whole(p.grad) for n, p in model.named_parameters()},
            "weights": {n: whole(p.detach()) for n, p in model.named_parameters()},
        }
    torch.save(results, Path(directory) / f"{rank}.pt")
    del wrapped, objective, model  # freed after the group, they would wait for its threads
    gc.collect()
    dist.barrier()  # whoever leaves first takes its side of the connections along
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """Return the files saved by two processes that received a model."""
    directory = tmp_path_factory.mktemp("processes")
    model = fresh_model()
    processes = [
        SERVER.Process(target=worker, args=(rank, str(directory), model)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    return [torch.load(directory / f"{rank}.pt") for rank in range(2)]


def test_a_model_sent_to_another_process_arrives_with_one_matrix(two_processes):
    assert [result["received"] for result in two_processes] == [(["wte.weight"], True)] * 2


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_step_like_one(two_processes, kind):
    model = fresh_model()
    step(LossModule(model), *whole_batch())
    for result in two_processes:
        assert result[kind]["names"] == ["wte.weight"]
        for name, parameter in model.named_parameters():
            gradient, weight = (result[kind][what][name] for what in ("gradients", "weights"))
            torch.testing.assert_close(gradient, parameter.grad, atol=1e-6, rtol=1e-5, msg=name)
            torch.testing.assert_close(weight, parameter.detach(), atol=1e-6, rtol=1e-5, msg=name)
    first, second = (result[kind]["weights"] for result in two_processes)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_results_are_sentences_in_a_notebook():
    model = random_gpt(tie_word_embeddings=False)
    for result in (
        ledger(model),
        audit(model),
        tie(model, keep="input"),
        freeze(model, "body,+wte"),
    ):
        assert repr(result) == str(result) and not repr(result).startswith(type(result).__name__)
