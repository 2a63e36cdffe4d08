"""Full and failing disks: checkpoints stay valid, and the run resumes later."""

import errno
import shutil
from pathlib import Path

import pytest

from tests.train.trials import KILLED, Command, Fault, left, operations
from tiedgpt.train.checkpoint import list_checkpoints, verify


def fail_at(ready: Path, whole: Path, fault: Fault) -> int:
    """Fail, then go on with a good disk; return the exit code of the failing command."""
    run = shutil.copytree(ready, ready.with_name(f"failed-{fault.at}"))
    command = Command(run, fault=fault)
    code, said = command.wait(), command.output()
    at = f"{operations(run)[fault.at]}: {said}"
    assert "Traceback" not in said, at
    if code == 0:  # it was passed over: a deletion that can wait
        assert left(run) == left(whole), at
    elif (kept := list_checkpoints(run / "checkpoints")) and len(kept) > 1:
        verify(kept[-2])
        verify(kept[-1])
    again = Command(run)
    assert again.wait() == 0, f"{at} {again.output()}"
    assert left(run) == left(whole), at
    shutil.rmtree(run)
    return code


def test_a_full_disk_ends_the_run_with_code_4_and_keeps_the_checkpoints(ready, whole):
    every = len(operations(whole))
    codes = {
        fail_at(ready, whole, Fault(number, error=errno.ENOSPC, lasting=True))
        for number in range(7, every, every // 4)
    }
    assert codes == {4}


def test_a_disk_error_is_one_line_and_keeps_the_checkpoints(ready, whole):
    every = len(operations(whole))
    for number in range(11, every, every // 4):
        assert fail_at(ready, whole, Fault(number, error=errno.EIO)) in (0, 1, 3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("error", "lasting", "codes"),
    [(errno.ENOSPC, True, {0, 4}), (errno.ENOSPC, False, {0, 4}), (errno.EIO, False, {0, 1, 3})],
)
def test_a_failing_disk_at_any_operation_loses_nothing(ready, whole, error, lasting, codes):
    for number in range(len(operations(whole))):
        assert fail_at(ready, whole, Fault(number, error=error, lasting=lasting)) in codes


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("model.safetensors", "flipped"),
        ("optimizer.safetensors", "cut"),
        ("state.json", "flipped"),
        ("manifest.json", "gone"),
    ],
)
def test_a_damaged_checkpoint_is_set_aside_and_the_result_is_the_same(ready, whole, file, damage):
    run = shutil.copytree(ready, ready.with_name("damaged"))
    checkpoint, kept = stop_in_step_5(run, whole)
    path = checkpoint / file
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(data[:-1])
    else:
        path.unlink()
    again = Command(run)
    assert again.wait() == 0, again.output()
    assert f"passed over a damaged checkpoint: {checkpoint}" in again.output()
    aside = checkpoint.with_name(checkpoint.name + ".damaged")
    assert f"kept as {aside}" in again.output()
    assert sorted(p.name for p in aside.iterdir()) == sorted(
        name for name in kept if damage != "gone" or name != file
    )
    assert left(run) == left(whole)


def stop_in_step_5(run: Path, whole: Path) -> tuple[Path, list[str]]:
    """Kill a run with two checkpoints; return the newest and its files."""
    found = enumerate(operations(whole))
    lines = [n for n, what in found if "open a" in what and "metrics" in what]
    # steps 1 to 4, an evaluation, step 5
    assert Command(run, fault=Fault(lines[5])).wait() == KILLED
    assert [p.name for p in list_checkpoints(run / "checkpoints")] == ["step-000002", "step-000004"]
    newest = run / "checkpoints" / "step-000004"
    return newest, [path.name for path in newest.iterdir()]
