import errno
import os
import resource
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiedgpt.data import Shards, ShardWriter
from tiedgpt.errors import CorruptInputError, NoRoomError, UserError


def shard(directory, ids, **options):
    options = {"vocab_size": 65_536, **options}
    with ShardWriter(directory, "train", **options) as writer:
        writer.write(np.array(ids, dtype=np.uint32))
    return writer.paths


def test_a_shard_has_llm_cs_bytes(tmp_path):
    (path,) = shard(tmp_path, [1, 256, 65_535])
    assert path.name == "train_000000.bin"
    header = bytes.fromhex("88d83401 01000000 03000000") + bytes(1012)  # 20240520, 1, 3 tokens
    assert path.read_bytes() == header + bytes.fromhex("0100 0001 ffff")


@given(
    st.lists(st.lists(st.integers(0, 65_535), max_size=20), max_size=8),
    st.integers(1, 30),
    st.data(),
)
def test_any_writes_and_shard_sizes_give_the_tokens_back(writes, tokens_per_shard, data):
    ids = [token for part in writes for token in part]
    with tempfile.TemporaryDirectory() as directory:
        options = {"vocab_size": 65_536, "tokens_per_shard": tokens_per_shard}
        with ShardWriter(directory, "train", **options) as writer:
            for part in writes:
                writer.write(np.array(part, dtype=np.uint16))
        assert writer.n_tokens == len(ids)
        assert len(writer.paths) == -(-len(ids) // tokens_per_shard)
        assert sorted(Path(directory).iterdir()) == writer.paths
        if ids:
            shards = Shards.in_directory(directory, "train")
            start = data.draw(st.integers(0, len(ids)))
            stop = data.draw(st.integers(start, len(ids)))
            assert len(shards) == len(ids)
            assert shards.read(start, stop).tolist() == ids[start:stop]
            assert shards.read(0, len(ids)).dtype == np.uint16


def test_an_empty_shard_between_others_holds_nothing(tmp_path):
    first, second = shard(tmp_path, [1, 2], tokens_per_shard=1)
    empty = tmp_path / "empty.bin"
    empty.write_bytes(first.read_bytes()[:8] + bytes(1016))
    assert Shards([first, empty, second]).read(0, 2).tolist() == [1, 2]


def test_ids_beyond_16_bits_or_the_vocabulary_are_refused(tmp_path):
    with pytest.raises(UserError, match="65,537 tokens does not fit a shard's 16 bits"):
        ShardWriter(tmp_path, "train", vocab_size=65_537)
    with pytest.raises(UserError, match="ids 3 to 70000 are outside a vocabulary of 65,536"):
        shard(tmp_path, [3, 70_000])
    with pytest.raises(UserError, match="ids 10 to 10 are outside a vocabulary of 10"):
        shard(tmp_path, [10], vocab_size=10)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tokens_per_shard", [0, 2**31])
def test_a_shard_holds_as_many_tokens_as_its_header_can_say(tmp_path, tokens_per_shard):
    with pytest.raises(UserError, match="tokens_per_shard must be 1 to"):
        shard(tmp_path, [1], tokens_per_shard=tokens_per_shard)


def test_a_shard_is_never_overwritten(tmp_path):
    (path,) = shard(tmp_path, [1])
    with pytest.raises(UserError, match=r"cannot write .*train_000000\.bin: File exists"):
        shard(tmp_path, [2])
    assert Shards([path]).read(0, 1).tolist() == [1]
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_reported_and_leaves_no_partial_file(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(NoRoomError, match=r"no room on the disk for .*train_000000\.bin"):
            shard(tmp_path, range(20_000))
        with pytest.raises(NoRoomError), ShardWriter(tmp_path, "train", vocab_size=10) as writer:
            for _ in range(100):
                writer.write(np.zeros(1000, dtype=np.uint16))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_a_quota_exceeded_at_the_last_byte_is_reported(tmp_path, monkeypatch):
    def fail(file):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(NoRoomError):
        shard(tmp_path, [1])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("theirs")], ids=repr)
def test_a_callers_error_leaves_no_partial_file_and_is_no_disk_error(tmp_path, error):
    with pytest.raises(type(error)) as caught:
        with ShardWriter(tmp_path, "train", vocab_size=10) as writer:
            writer.write(np.arange(5))
            raise error
    assert caught.value is error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:500],
        lambda data: data[:-1],
        lambda data: data + b"\0\0",
        lambda data: b"\x93NUMPY" + data[6:],
        lambda data: data[:4] + b"\x07" + data[5:],
        lambda data: data[:8] + b"\xff\xff\xff\xff" + data[12:],
    ],
)
def test_a_damaged_shard_is_refused_when_it_is_opened(tmp_path, damage):
    (path,) = shard(tmp_path, [1, 2, 3])
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CorruptInputError, match=r"train_000000\.bin is damaged or is no token"):
        Shards([path])


@pytest.mark.parametrize(
    "change",
    [
        lambda path: os.truncate(path, 1024),
        lambda path: path.write_bytes(path.read_bytes() + b"\0\0"),
        lambda path: os.utime(path, (0, 0)),
        lambda path: path.unlink(),
        lambda path: (
            path.with_suffix(".new").write_bytes(b"new") and path.with_suffix(".new").rename(path)
        ),
    ],
    ids=["truncated", "longer", "touched", "removed", "replaced"],
)
def test_a_shard_that_changes_while_training_is_noticed_before_it_is_read(tmp_path, change):
    first, second = shard(tmp_path, [1, 2, 3, 4], tokens_per_shard=2)
    shards = Shards([first, second])
    change(second)
    assert shards.read(0, 2).tolist() == [1, 2]
    with pytest.raises(CorruptInputError, match=r"train_000001\.bin changed while training"):
        shards.read(1, 3)


def test_a_missing_directory_and_missing_shards_are_an_error(tmp_path):
    with pytest.raises(UserError, match=r"cannot write .*train_000000\.bin: No such file"):
        shard(tmp_path / "missing", [1])
    with pytest.raises(UserError, match=r"no val_\*\.bin in"):
        Shards.in_directory(tmp_path, "val")
    with pytest.raises(UserError, match=r"cannot read .*gone\.bin: No such file"):
        Shards([tmp_path / "gone.bin"])
