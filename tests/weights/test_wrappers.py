"""Checkpoints of trainers: audit, load, fix and convert agree under any chain of wrappers."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

from tests.models import random_gpt
from tests.tie.checkpoints import nanogpt_state, their_gpt2
from tests.weights.conftest import assert_same_logits
from tiedgpt import GPT
from tiedgpt.cli.main import main
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.tie import audit, fix

IDS = torch.arange(24)[None]
CHAINS = (
    "", "module.", "_orig_mod.", "module._orig_mod.", "model.", "net.", "gpt.", "transformer.",
    "_module.", "model._module.", "_forward_module.", "_forward_module._orig_mod.",
    "_fsdp_wrapped_module.", "_fsdp_wrapped_module._fpw_module.", "model.module.",
    "lightning_module.student.net.", "base_model.model.",
)  # fmt: skip
"""Names of modules around a GPT, as the trainers write them."""
INNER = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")
"""Names of modules around a block."""


def with_prefix(state: dict, chain: str, inner: str = "") -> dict:
    return {
        chain + name.replace("h.1.", f"h.1.{inner}"): tensor.clone()
        for name, tensor in state.items()
    }


def lightning(path, state, peer):
    """Write a file as the `save_checkpoint` of Lightning's trainer does."""
    counters = {"epoch": 1, "global_step": 3, "pytorch-lightning_version": "2.5.0"}
    moments = [{"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 1e-3}]}]
    torch.save(counters | {"state_dict": state, "optimizer_states": moments}, path / "last.ckpt")
    return path / "last.ckpt"


def deepspeed(path, state, peer):
    shapes = [{name: tensor.shape for name, tensor in state.items()}]
    torch.save({"module": state, "param_shapes": shapes, "dp_world_size": 1}, path / "states.pt")
    return path / "states.pt"


def under(key):
    def write(path, state, peer):
        step, rng = {"step": 7}, {"rng": torch.get_rng_state(), "lr": torch.tensor(0.1)}
        torch.save(step | rng | {"optimizer": {"state": {}}, key: state}, path / "model.pt")
        return path / "model.pt"

    return write


def safetensors(path, state, peer):
    save_file(state, path / "model.safetensors")
    return path


def sharded(path, state, peer):
    names = sorted(state)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, some in shards.items():
        save_file({name: state[name] for name in some}, path / file)
    weight_map = {name: file for file, some in shards.items() for name in some}
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


FILES = {
    "Lightning": lightning, "DeepSpeed": deepspeed, "safetensors": safetensors, "shards": sharded,
    "model_state_dict": under("model_state_dict"), "net": under("net"), "weights": under("weights"),
}  # fmt: skip


def layouts(peer) -> dict[str, dict]:
    """Return one GPT's tensors as the programs name them."""
    state = {n: t for n, t in peer.state_dict().items() if n != "lm_head.weight"}
    head = {"lm_head.weight": peer.lm_head.weight.detach()}
    return {
        "transformers": state | head,
        "transformers, without the head": state,
        "transformers before 2019": state | {"lm_head.decoder.weight": head["lm_head.weight"]},
        "a bare body": peer.transformer.state_dict(),
        "a body of another name": {
            n.replace("transformer.", "backbone.", 1): t for n, t in (state | head).items()
        },
    }


def check_all_commands_agree(path, peer, tmp_path, **options):
    report = audit(path)
    assert report.verdict in ("tied", "tied, stored twice") and report.exit_code == 0
    loaded = GPT.from_pretrained(path, **options)
    assert loaded.head is None
    assert_same_logits(loaded, peer)
    assert main(["convert", str(path), str(tmp_path / "converted")]) == 0
    copies = [tmp_path / "converted"]
    if report.verdict == "tied, stored twice":
        fix(path, tmp_path / "fixed")
        copies.append(tmp_path / "fixed")
    for copy in copies:
        assert audit(copy).verdict == "tied"
        again = type(peer).from_pretrained(copy).eval()
        assert_same_logits(lambda ids, model=again: model(ids).logits, peer, IDS)


@pytest.fixture(scope="module")
def peer():
    """Return a GPT-2 of transformers, which no test changes."""
    return their_gpt2()


@pytest.fixture
def source(tmp_path, peer):
    """Return a directory with the config.json of the peer."""
    config = peer.config.to_dict() | {"architectures": ["GPT2LMHeadModel"]}
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    return tmp_path / "in"


@pytest.mark.filterwarnings("ignore::tiedgpt.weights.load.CheckpointWarning")
@pytest.mark.parametrize(
    ("layout", "chain"),
    [("transformers", chain) for chain in CHAINS]
    + [(layout, "model._module.") for layout in layouts(their_gpt2())][1:],
)
def test_a_wrapped_gpt_is_the_gpt_in_all_commands(layout, chain, peer, source, tmp_path):
    state = with_prefix(layouts(peer)[layout], chain, INNER[len(chain) % len(INNER)])
    check_all_commands_agree(safetensors(source, state, peer), peer, tmp_path)


@pytest.mark.filterwarnings("ignore::tiedgpt.weights.load.CheckpointWarning")
@pytest.mark.parametrize("file", FILES)
def test_every_trainers_file_is_read(file, peer, source, tmp_path):
    state = with_prefix(peer.state_dict(), "model._forward_module.")
    check_all_commands_agree(FILES[file](source, state, peer), peer, tmp_path)


@pytest.mark.filterwarnings("ignore::tiedgpt.weights.load.CheckpointWarning")
@pytest.mark.parametrize("chain", CHAINS)
def test_other_layouts_are_recognised_under_a_wrapper(chain, peer, tmp_path):
    state = with_prefix(nanogpt_state(peer, bias=True), chain)
    path, facts = lightning(tmp_path, state, peer), {"n_head": 4}
    loaded = GPT.from_pretrained(path, **facts, activation_function="gelu_new")
    assert_same_logits(loaded, peer)
    assert audit(path).verdict == "tied, stored twice"
    if chain != "transformer.":  # then it is nanoGPT's
        ours = random_gpt()
        torch.save(with_prefix(ours.state_dict(), chain), tmp_path / "ours.pt")
        assert torch.equal(GPT.from_pretrained(tmp_path / "ours.pt", **facts)(IDS), ours(IDS))


class Holder(nn.Module):
    """A module with a GPT as an attribute, as a LightningModule has it."""

    def __init__(self, gpt: nn.Module) -> None:
        super().__init__()
        self.net = gpt


WRAPPERS = {
    "DataParallel": nn.DataParallel,
    "AveragedModel": AveragedModel,
    "torch.compile": lambda model: torch.compile(model, backend="eager"),
    "an attribute": Holder,
    "two of them": lambda model: Holder(nn.DataParallel(model)),
}


@pytest.mark.filterwarnings("ignore::tiedgpt.weights.load.CheckpointWarning")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_model_and_its_state_dict_load_as_the_model(wrapper, peer, source, tmp_path):
    wrapped = WRAPPERS[wrapper](peer)
    assert audit(wrapped).verdict == "tied"
    assert_same_logits(GPT.from_pretrained(wrapped), peer)
    torch.save(wrapped.state_dict(), source / "state.pt")
    check_all_commands_agree(source / "state.pt", peer, tmp_path)


@pytest.mark.parametrize(
    ("names", "keys"),
    [
        (("ema", "net"), ("'ema'", "'net'")),
        (("net", "ema"), ("'ema'", "'net'")),
        (("model", "model_ema"), ("'model'", "'model_ema'")),
        (("state_dict", "module"), ("'state_dict'", "'module'")),
        (("net", "averaged.model"), ("'net'", "'averaged'")),
        (("", "ema"), ("'ema'", "first level")),
    ],
)
def test_a_file_of_two_state_dicts_is_refused_with_their_keys(names, keys, peer, source):
    first, second = peer.state_dict(), {n: t + 1 for n, t in peer.state_dict().items()}
    saved = {}
    for name, state in zip(names, (first, second), strict=True):
        *outer, last = name.split(".")
        saved |= {outer[0]: {last: state}} if outer else {name: state} if name else state
    torch.save(saved, source / "pytorch_model.bin")
    with pytest.raises(UserError) as refused:
        GPT.from_pretrained(source)
    assert all(key in refused.value.message for key in keys)
    assert "torch.save" in refused.value.hint


@pytest.mark.parametrize("key", ["model", "net"])
def test_an_optimizer_beside_the_model_is_passed_over(key, peer, source):
    moments = {"exp_avg": {name: t + 1 for name, t in peer.state_dict().items()}}
    by_number = {"state": {0: {"exp_avg": torch.zeros(3, 5)}}, "param_groups": [{"lr": 1e-3}]}
    rest = {"optimizer": by_number, "optim": moments["exp_avg"], "rng": {"cpu": torch.zeros(3)}}
    torch.save(rest | {key: peer.state_dict()}, source / "pytorch_model.bin")
    assert_same_logits(GPT.from_pretrained(source), peer)


def test_a_gpt_beside_other_tensors_is_refused_with_their_names(peer, source):
    state = with_prefix(peer.state_dict(), "gpt.") | {"image.projection.weight": torch.ones(5, 7)}
    path = safetensors(source, state, peer)
    with pytest.raises(CorruptInputError, match=r"gpt\..*image\.projection\.weight.*state_dict"):
        GPT.from_pretrained(path)
    report = audit(path)
    assert report.exit_code == 6 and "image.projection.weight" in report.load_error
