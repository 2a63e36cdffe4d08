"""Any device works: tensors lie where their inputs do, and no code assumes the CPU."""

import ast
import copy
from pathlib import Path

import pytest
import torch

import tiedgpt
from tests.models import TEXT, opinionated
from tiedgpt import GPT, GPTConfig, KVCache, Tokenizer
from tiedgpt.heads import MultipleChoice, SequenceClassifier
from tiedgpt.heads.predictions import predict
from tiedgpt.infer import Engine
from tiedgpt.inspect.registry import INSPECTIONS
from tiedgpt.tie import prune, resize_vocab, untie
from tiedgpt.train import fast_training
from tiedgpt.train.step.optim.groups import optimizers, parameter_groups
from tiedgpt.tune import lora, merge
from tiedgpt.weights.formats.packed.calibration import calibrate

SOURCE = Path(tiedgpt.__file__).parent
FACTORIES = set(
    "arange as_tensor empty eye full linspace logspace normal ones rand randint randn randperm "
    "scalar_tensor tensor zeros".split()
)
"""Functions of torch that put a tensor on the default device unless they are given one."""
ON_THE_DEFAULT_DEVICE = {"core/model.py"}
"""Files whose tensors shall lie there: `with torch.device(...): GPT(config)`."""
ON_THE_CPU = {
    "infer/torch_session.py": "its",
    "inspect/inputs.py": "(tensor.float() if narrow else tensor)",
    "train/step/fast/threads.py": "(flat.view(torch.uint16) if flat.dtype == torch.bfloat16 "
    "else flat)",
    "train/tasks/labelled.py": "ids lengths tensor.cpu()",
    "train/tasks/regress.py": "ids lengths",
    "weights/tensors.py": "block",
    "weights/formats/gguf/writer.py": "numbers convert_tensor(name, tensor, DTYPES[qtype.name])"
    ".flatten().view(torch.uint8)",
}
"""Names and expressions that a `.cpu()`, a `from_numpy` or `pad` on another line puts there."""
HERE = "convert_tensor(", ".cpu()", ".to('cpu'"
"""Parts of expressions on the CPU: `convert_tensor` returns such a tensor."""


def calls(names):
    """Yield (file, text of the owner, call) of each call of a method or function with a name."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr in names:
                    yield path.relative_to(SOURCE).as_posix(), ast.unparse(node.func.value), node


def test_every_new_tensor_names_its_device():
    wrong = []
    for file, owner, call in calls(FACTORIES):
        has_device = any(keyword.arg == "device" for keyword in call.keywords)
        if owner == "torch" and not has_device and file not in ON_THE_DEFAULT_DEVICE:
            wrong.append(f"{file}: {ast.unparse(call)}")
    assert not wrong


def test_only_tensors_on_the_cpu_become_arrays():
    wrong = []
    for file, owner, call in calls({"numpy"}):
        expressions = ON_THE_CPU.get(file, "")
        is_here = owner in expressions if expressions else any(sign in owner for sign in HERE)
        if not (is_here or call.args):
            wrong.append(f"{file}: {owner}")
    assert not wrong


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([TEXT], 300)


@pytest.fixture(scope="module")
def model(tokenizer):
    return opinionated(tokenizer)


@pytest.fixture
def another_default():
    """Make a device the default that no tensor of the model is on, and that has no data."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


ARGUMENTS = {
    "patch": {"text": "the cat sat", "corrupted": "the dog sat", "answer": 5},
    "direction": {"toward": "the cat", "away": "the dog"},
    "neighbours": {"token": 5},
}


@pytest.mark.parametrize("name", INSPECTIONS)
def test_inspections_do_not_depend_on_the_default_device(name, model, tokenizer, another_default):
    inspection = INSPECTIONS[name]
    text = {"text": "the cat sat on the mat"} if inspection.reads_text else {}
    assert inspection.function(model, tokenizer, **(text | ARGUMENTS.get(name, {}))).to_json()


def generate(model, tokenizer):
    with Engine(model, tokenizer=tokenizer) as engine:
        assert len(engine.generate("the cat", max_new_tokens=4, num_beams=2).ids) == 4
        assert engine.score("the cat sat").logprobs


def adapt(model, tokenizer):
    adapted = copy.deepcopy(model)
    lora(adapted, rank=2, targets=("wte", "h.0.*"))
    ids = torch.ones(2, 5, dtype=torch.long, device="cpu")
    adapted.loss(ids, ids).backward()
    merge(adapted)


def classify(model, tokenizer):
    head = SequenceClassifier(copy.deepcopy(model), labels=["a", "b"]).eval()
    assert len(list(predict(head, tokenizer, [{"text": "the"}, {"text": "the cat"}]))) == 2


DEFAULTS = {
    "generate": generate,
    "adapt": adapt,
    "classify": classify,
    "untie": lambda model, _: untie(copy.deepcopy(model)),
    "resize": lambda model, _: resize_vocab(copy.deepcopy(model), len(model.wte.weight) + 10),
    "prune": lambda model, _: prune(copy.deepcopy(model), [297, *range(290)]),
    "calibrate": lambda model, _: calibrate(model, [n % 300 for n in range(200)]),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_models_in_memory_do_not_depend_on_the_default_device(
    name, model, tokenizer, another_default
):
    DEFAULTS[name](model, tokenizer)


def gpt_elsewhere(**fields):
    """Return a model and ids (2, 12) on the meta device: they have no values, and are not mixed."""
    config = GPTConfig(vocab_size=97, n_positions=12, n_embd=32, n_layer=2, n_head=4, **fields)
    with torch.device("meta"):
        return GPT(config), torch.zeros(2, 12, dtype=torch.long)


def forward(model, ids):
    starts = torch.zeros_like(ids)
    return model(ids), model.loss(ids, ids, document_starts=starts), *model.states(ids)


def decode(model, ids):
    cache = KVCache.allocate(model.config, batch_size=2, capacity=12, device="meta")
    with torch.no_grad():
        return model(ids[:, :5], cache), model(ids[:, 5:6], cache)


def step(model, ids):
    """Train without reading a number back."""
    groups = parameter_groups(model, matrices="muon", weight_decay=0.1)
    with fast_training(model):
        model.loss(ids, ids).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers(groups, lr=1e-3):
        if not isinstance(optimizer, torch.optim.AdamW):  # torch's own, fused, needs a real device
            optimizer.step()
    return *(p for p in model.parameters()), *(p.grad for p in model.parameters())


def heads(model, ids):
    lengths = torch.full((2,), 12, device="meta")
    choice, classifier = MultipleChoice(model), SequenceClassifier(model, labels=["a", "b"])
    return classifier(ids, lengths), choice(ids[None], lengths[None])


@pytest.mark.parametrize("compute", [forward, decode, step, heads])
@pytest.mark.parametrize("fields", [{}, {"attention_windows": (0, 5)}, {"norm": "post"}])
def test_all_tensors_are_on_the_models_device(compute, fields):
    results = compute(*gpt_elsewhere(**fields))
    assert {tensor.device.type for tensor in results} == {"meta"}
