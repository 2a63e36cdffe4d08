"""Fine-tuning: exact masks, adapters alone in checkpoints, one command that goes on."""

import json
import re
import shutil
import tomllib
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.train.conftest import CPU, Trial, assert_resumes, metrics, write_lines
from tests.train.test_parallel import together
from tests.tune.test_adapters import drawn
from tiedgpt import GPT, GPTConfig, Tokenizer
from tiedgpt.cli.main import main
from tiedgpt.data import read_template
from tiedgpt.infer import Engine
from tiedgpt.train.distributed import Processes, join_processes
from tiedgpt.train.dry_run import make_plan, prepare_fresh
from tiedgpt.train.plan.options import TuneOptions
from tiedgpt.train.store.directory import RunDirectory
from tiedgpt.train.store.runs import find_tune_start
from tiedgpt.train.tasks.replies import reply_to
from tiedgpt.train.tasks.task import Pretrained, open_task
from tiedgpt.tune import load_adapter, lora, save_adapter
from tiedgpt.weights.checkpoint import StoredTensor


def chat(n, colours=("red", "blue", "green")):
    said = f"name {n % 7}", f"it is {colours[n % 7 % len(colours)]}"
    return [{"role": r, "content": c} for r, c in zip(("user", "assistant"), said, strict=True)]


LINES = {
    "messages": [{"messages": chat(n) + chat(n // 7)} for n in range(49)],
    "completion": [{"prompt": f"no {n}:", "completion": f" yes {n}"} for n in range(40)],
    "text": [{"text": f"line {n} of text " * 4} for n in range(30)],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a tiny model and data of each kind."""
    place = tmp_path_factory.mktemp("tuned")
    texts = [json.dumps(line) for lines in LINES.values() for line in lines]
    for kind, lines in LINES.items():
        write_lines(place / f"{kind}.jsonl", lines)
    tokenizer = Tokenizer.train(texts, 300)
    shape = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=len(tokenizer), **shape, eos_token_id=tokenizer.eos_token_id))
    model.save_pretrained(place / "base")
    tokenizer.save_pretrained(place / "base")
    return place


@pytest.fixture
def options(place):
    def make(kind, **more):
        given = {"steps": 8, "lr": 1e-2, "dtype": "fp32"} | more
        data = (str(place / f"{kind}.jsonl"),)
        return TuneOptions(data=data, start=str(place / "base"), **given)

    return make


@pytest.fixture
def make(tmp_path, options):
    """Make a run on data of a kind, under a name."""
    return lambda kind, name="run", **more: open_run(tmp_path / name, options(kind, **more))


def open_run(path, options, processes=None):
    """Return the run of these options."""
    run = RunDirectory(path)
    run.path.mkdir(exist_ok=True)
    prepared = prepare_fresh(open_task(options), run)
    data, plan = prepared.data(prepared.config), make_plan(prepared, processes or Processes(CPU))
    return Trial(run, prepared.task, data, prepared.config, plan)


REPLIES = {
    "messages": {"it is red<|im_end|>", "it is blue<|im_end|>", "it is green<|im_end|>"},
    "completion": {f"{line['completion']}<|endoftext|>" for line in LINES["completion"]},
}


@pytest.mark.parametrize("kind", REPLIES)
def test_the_loss_is_the_cross_entropy_of_the_replies_alone(make, kind):
    run = make(kind, batch_size=4)
    task, model = run.task, run.build().eval()
    batch = [torch.from_numpy(array) for array in run.data.batches(4, 0)(0)]
    losses, replies = [], []
    for ids, targets, first in zip(*batch, strict=True):
        for start in first.unique().tolist():
            alone = first == start
            kept = targets[alone] != -100
            if kept.any():
                logits, ended = model(ids[alone][None])[0], targets[alone][kept]
                losses.append(F.cross_entropy(logits[kept], ended, reduction="none"))
                replies += re.findall(r".*?<\|\w+\|>", run.data.tokenizer.decode(ended.tolist()))
    assert len(replies) > 4 and {*replies} <= REPLIES[kind]
    torch.testing.assert_close(task.loss(model, batch), torch.cat(losses).mean())
    assert task.n_targets(tuple(array.numpy() for array in batch)) == (len(torch.cat(losses)),)


def test_the_context_comes_from_the_header_without_reading_weights(
    options, place, tmp_path, monkeypatch
):
    def refuse(*_):
        raise AssertionError("a tensor was read")

    for name in ("native", "rows", "tensor"):
        monkeypatch.setattr(StoredTensor, name, refuse)
    assert open_task(options("completion")).read().context == 64
    other = shutil.copytree(place / "base", tmp_path / "other")
    config = json.loads((other / "config.json").read_text()) | {"n_positions": 400, "n_ctx": 400}
    (other / "config.json").write_text(json.dumps(config))
    wrong = replace(options("completion"), start=str(other))
    sources = open_task(wrong).read()
    assert sources.context == 64  # the model's rows decide, as when it is loaded


def test_packing_can_be_switched_off_for_examples_and_on_for_text(make):
    run = make("completion", packing="off")
    assert run.data.epoch_rows == len(run.data.examples) and run.plan.batch_size > 1
    run = make("text", "text", packing="on")
    ids, _, first = run.data.batches(run.plan.batch_size, 0)(0)
    eos = run.data.tokenizer.eos_token_id
    starts = [row[row > 0] for row in first]
    assert any(map(len, starts)) and run.data.template is None
    for row, at in zip(ids, starts, strict=True):
        assert (row[at - 1] == eos).all()


def test_the_largest_number_of_turns_is_recorded_in_the_template_and_in_run_toml(make):
    run = make("messages", steps=1)
    run.train()
    assert read_template(run.run.model).max_turns == 2
    assert run.data.counts["train_examples"]["max_turns"] == 2


def test_prompts_with_completions_tune_a_model_for_generate(make):
    assert any("tiedgpt generate" in note for note in make("completion").data.notes)
    assert not any("tiedgpt generate" in note for note in make("messages").data.notes)


def test_trained_tokens_are_counted_and_reported(place, folder, capfd):
    command = ["tune", str(place / "messages.jsonl"), "--from", str(place / "base"), "--steps", "1"]
    assert main([*command, "--lora", "2", "--memory", "8", "--format", "json"]) == 0
    out, err = capfd.readouterr()
    assert "profil" not in err
    n = 2 * (2 * 16 * 32) + 2 * 32  # of two blocks, and two new rows
    assert json.loads(out)["trained"] == n
    assert f"{n:,} are trained" in " ".join(err.split()) and "W (wte) reads and predicts" in err


@pytest.mark.parametrize("more", [{}, {"lora": 2, "lora_targets": "wte,attn.c_attn"}])
@pytest.mark.parametrize("kind", ["messages", "text"])
def test_a_resumed_run_equals_an_uninterrupted_one(make, kind, more):
    files = ("config.json", "tokenizer.json")
    assert_resumes(lambda name: make(kind, name, batch_size=2, **more), 3, files, reopens=True)


def tune_in_parallel(path, kind, options):
    """Act as one of several tuning processes."""
    with join_processes(kind, CPU) as processes:
        run = processes.main_first(lambda: open_run(path, options, Processes(CPU)))
        *_, ended = run.train(processes=processes)
    return 0 if ended.finished else 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_tune_like_one(tmp_path, options, kind):
    asked = options(
        "messages", batch_size=3, dropout=0.0, lora=2, lora_targets="wte,attn.c_attn", lr=1e-3
    )
    open_run(tmp_path / "one", asked).train()
    assert together(tune_in_parallel, tmp_path / "two", kind, asked) == [0, 0]
    one, two = (metrics(tmp_path / name) for name in ("one", "two"))
    assert len(one) == len(two) > 8
    for here, there in zip(one, two, strict=True):
        for name in {"loss", "val_loss", "grad_norm"} & here.keys():
            assert there[name] == pytest.approx(here[name], abs=1e-5)
    weights = [GPT.from_pretrained(tmp_path / name / "model") for name in ("one", "two")]
    for a, b in zip(*(model.parameters() for model in weights), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_adapters_leave_frozen_weights_and_checkpoints_hold_adapters_only(make, place):
    run = make("completion", lora=4, lr=3e-2, steps=20)
    run.train()
    saved = load_file(run.newest())
    assert saved and all("lora_" in name for name in saved)
    base, tuned = GPT.from_pretrained(place / "base"), run.model()
    ids = torch.arange(40)[None]
    tuned_logits, moved = tuned.eval()(ids), []
    for (name, one), other in zip(base.named_parameters(), tuned.parameters(), strict=True):
        if not torch.equal(one, other):
            moved.append(name.partition(".")[2].partition(".")[2])
    targets = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert {*moved} == {f"{name}.weight" for name in targets}
    load_adapter(base, run.run.path / "adapter")
    torch.testing.assert_close(base.eval()(ids), tuned_logits, atol=1e-4, rtol=0)


@pytest.fixture
def adapter(place, tmp_path):
    """An adapter in PEFT's format, and the base with it."""
    model = GPT.from_pretrained(place / "base")
    lora(model, 2)
    drawn(model, 0.1)
    save_adapter(model, tmp_path / "adapter")
    return model.eval()


def test_convert_merges_an_adapter_or_refuses_it_and_writes_nothing(
    place, tmp_path, adapter, capsys
):
    merged, config = tmp_path / "merged", tmp_path / "adapter/adapter_config.json"
    command = ["convert", str(place / "base"), str(merged), "--adapter", str(config.parent)]
    assert main(command) == 0
    ids, model = torch.arange(40)[None], GPT.from_pretrained(merged).eval()
    torch.testing.assert_close(model(ids), adapter(ids), atol=1e-4, rtol=0)
    shutil.rmtree(merged)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_dora": True}))
    assert main(command) == 1
    assert "use_dora=True is not supported" in " ".join(capsys.readouterr().err.split())
    assert not merged.exists()


def test_a_few_epochs_teach_the_format(make, place):
    run = make("messages", steps=90, batch_size=4)
    before = run.build()
    Pretrained(str(place / "base"), keep_head=True).put_into(before)
    first = run.score(before, 4).nats
    last = run.train()[-1].score.nats
    assert first > 5 and last < 0.8
    model = run.run.model
    tokenizer, template = Tokenizer.from_pretrained(model), read_template(model)
    engine = Engine(model, backend="torch")
    follows = [reply_to(engine.model, run.data, run.data.validation, n) for n in range(10)]
    ends = [" ".join(reply.split()[:2]) == "it is" for reply, _ in follows]
    assert sum(ends) >= 9 and template.name == "chatml"
    assert all(re.fullmatch(r"name \d", question) for _, question in follows)
    generation = json.loads((model / "generation_config.json").read_text())
    assert generation["eos_token_id"] == template.end_ids(tokenizer)


@pytest.mark.slow
def test_a_tuned_model_chats_in_transformers_and_stops(make):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = make("messages", steps=90, batch_size=4)
    run.train()
    model = AutoModelForCausalLM.from_pretrained(run.run.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(run.run.model)
    asked = chat(3)[:1]
    given = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    said = model.generate(**given, max_new_tokens=30, do_sample=False)[0]
    reply = said[given["input_ids"].shape[1] :].tolist()
    assert tokenizer.decode(reply).startswith("it is ") and len(reply) < 30
    assert reply[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    ours = Engine(run.run.model, backend="torch").generate(
        given["input_ids"][0].tolist(), max_new_tokens=30, temperature=0
    )
    assert ours.ids == reply and ours.finish_reason == "stop"


def test_the_same_command_resumes_its_run(place, folder, capsys):
    command = ["tune", str(place / "messages.jsonl"), "--epochs", "0.1"]
    assert main([*command, "--from", str(place / "base")]) == 0
    assert main(command) == 0
    assert "is finished" in " ".join(capsys.readouterr().err.split())
    record = tomllib.loads((folder / "runs/messages-tuned-1/run.toml").read_text())
    assert record["options"]["start"] == str(place / "base")
    assert record["model"]["attn_pdrop"] == 0 and record["model"]["resid_pdrop"] == 0
    assert record["training"]["lr"] == pytest.approx(4 * 6.25e-5 * 768 / 32)
    card = (folder / "runs/messages-tuned-1/model/README.md").read_text()
    assert 'recipe = "tune"' in card and str(place) not in card


GOOD = json.dumps(LINES["messages"][0]) + "\n"
USER = json.dumps({"messages": [{"role": "user", "content": "hello"}]}) + "\n"
MANY = "".join(json.dumps(line) + "\n" for line in LINES["messages"])
BAD = {
    "no JSON": (GOOD + "{", [], "bad.jsonl:2: not a JSON object"),
    "other fields": (GOOD + '{"a": 1}\n', [], "bad.jsonl:2: its fields are of none"),
    "another kind": (GOOD + '{"prompt": "a", "completion": "b"}\n', [], "of the kind completion"),
    "no reply": (GOOD + USER, [], "bad.jsonl:2: nothing in it is trained"),
    "all held out": (GOOD * 3, ["--val", "bad.jsonl"], "none is left to train on"),
    "too long": (GOOD * 3, ["--context", "4", "--too-long", "error"], "the context 4"),
    "all too long": (GOOD * 3, ["--context", "4"], "no example is left"),
    "long context": (MANY, ["--context", "400"], "has 64 positions"),
    "rank": (GOOD, ["--lora", "0"], "--lora must be an integer >= 1"),
    "targets": (GOOD, ["--lora-targets", "wte"], "needs the rank"),
    "both": (GOOD, ["--lora", "2", "--freeze", "wte"], "give it without --freeze"),
    "nothing": ("", [], "no line is an example"),
    "prompt": (GOOD, ["--sample-prompt", "a"], "--sample-prompt is for text"),
    "template": ('{"text": "a"}', ["--template", "plain"], "--template is for examples"),
    "packed": ('{"text": "a"}\n{"text": 1}', ["--packing", "on"], "bad.jsonl:2: 'text' must be"),
    "no text": ('{"text": ""}', ["--packing", "on"], "bad.jsonl:1: nothing in it is trained"),
    "two kinds": ('{"text": "a", "messages": []}', [], "several of the kinds: 'text', 'messages'"),
    "roles": (GOOD.replace('"user"', '"robot"'), [], "bad.jsonl:1: no role 'robot': the roles are"),
    "half a pair": ('{"prompt": "a", "completion": "\\ud800"}', [], "bad.jsonl:1: not a JSON"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_named_and_nothing_is_written(place, folder, capsys, what):
    text, more, problem = BAD[what]
    (folder / "bad.jsonl").write_text(text)
    assert main(["tune", "bad.jsonl", "--from", str(place / "base"), *more]) in (1, 3)
    assert problem in " ".join(capsys.readouterr().err.split())
    assert {path.name for path in folder.rglob("*")} <= {"bad.jsonl", "runs"}


def test_the_text_field_can_be_named(place, folder):
    data = write_lines(folder / "body.jsonl", [{"body": line["text"]} for line in LINES["text"]])
    command = ["tune", data, "--from", str(place / "base"), "--steps", "1"]
    assert main(command) == 3
    assert main([*command, "--text-field", "body"]) == 0


def test_bad_lines_can_be_skipped(tmp_path, options):
    path = write_lines(tmp_path / "mixed.jsonl", LINES["completion"])
    (tmp_path / "mixed.jsonl").write_text("{\n" + (tmp_path / "mixed.jsonl").read_text())
    start = options("text").start
    asked = TuneOptions(data=(path,), start=start, skip_bad=True, steps=1)
    examples = open_task(asked).read()
    assert len(examples.train) == len(examples.held_out) == 40 and not examples.holds_out
    assert "bad lines that were skipped: 1" in examples.notes[0]


@pytest.mark.parametrize(("n", "held_out"), [(99, 99), (100, 10), (590, 50), (1100, 55)])
def test_a_share_of_the_examples_validates_unless_they_are_few(tmp_path, options, n, held_out):
    lines = [{"prompt": f"{k}:", "completion": f" it is {k}"} for k in range(n)]
    data = (write_lines(tmp_path / "lines.jsonl", lines),)
    examples = open_task(TuneOptions(data=data, start=options("text").start, steps=1)).read()
    assert len(examples.held_out) == held_out
    assert len(examples.train) == (n - held_out if examples.holds_out else n)


def test_a_template_of_another_program_is_refused_by_name(place, folder, capsys):
    model = GPT.from_pretrained(place / "base")
    model.save_pretrained("other")
    Tokenizer.from_pretrained(place / "base").save_pretrained("other")
    (folder / "other/chat_template.jinja").write_text("{{ messages }}")
    command = ["tune", str(place / "messages.jsonl"), "--from", "other", "--steps", "1"]
    assert main(command) == 1
    assert "foreign templates are not executed" in " ".join(capsys.readouterr().err.split())
    assert main([*command, "--template", "plain"]) == 0


def test_a_recorded_run_without_a_start_model_is_passed_over(tmp_path):
    (tmp_path / "run.toml").write_text('[options]\nrecipe = "tune"\n')
    assert find_tune_start(TuneOptions(data=("a.jsonl",)), [tmp_path]) is None
