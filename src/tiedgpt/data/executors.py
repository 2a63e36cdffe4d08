"""Who encodes units of prepared data (`prepare.py`): processes of this machine, or a Ray cluster.

An executor is given a directory and numbers of units, and yields the number of each unit as it is
done. All that a worker reads and writes lies in files, which every node of a cluster must see.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from tiedgpt.data.prepare import Encode, encode_here, encode_unit
from tiedgpt.errors import NoRoomError, UserError


def in_processes(workers: int) -> Encode:
    """Return what encodes in so many processes, or in this one, if that is 1 or there is one unit.

    The processes are spawned: a fork of a process with the threads of a tokenizer may hang. They
    end with this process, however it ends.
    """

    def encode(directory: Path, numbers: Sequence[int]) -> Iterator[int]:
        if min(workers, len(numbers)) < 2:
            yield from encode_here(directory, numbers)
            return
        context = multiprocessing.get_context("spawn")
        theirs, ours = context.Pipe(duplex=False)
        pool = ProcessPoolExecutor(min(workers, len(numbers)), context, _end_with, (theirs,))
        try:
            tasks = {pool.submit(encode_unit, directory, number): number for number in numbers}
            for task in as_completed(tasks):
                task.result()
                yield tasks[task]
            pool.shutdown()
        except BrokenProcessPool:
            raise NoRoomError(
                "a process that encodes was killed, perhaps for the memory that it took",
                hint="the same command goes on; give fewer --workers, or call this in a script "
                "under `if __name__ == '__main__':`",
            ) from None
        finally:
            ours.close()
            pool.shutdown(cancel_futures=True)

    return encode


def _end_with(parent: Connection) -> None:
    """Begin a worker: it ends as soon as the other end of the connection is closed."""

    def wait() -> None:
        with suppress(EOFError, OSError):
            parent.recv()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=wait, daemon=True).start()


def on_ray(address: str) -> Encode:
    """Return what encodes on the Ray cluster at an address; "auto" finds one, "local" starts it."""
    try:
        import ray
    except ImportError:
        raise UserError("--ray needs the package ray", hint="pip install 'tiedgpt[ray]'") from None

    def encode(directory: Path, numbers: Sequence[int]) -> Iterator[int]:
        try:
            ray.init(address, ignore_reinit_error=True, log_to_driver=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UserError(f"--ray {address}: {error}", hint="`ray start` begins one") from None
        remote = ray.remote(encode_unit)
        tasks = {remote.remote(str(directory.absolute()), number): number for number in numbers}
        while tasks:
            for task in ray.wait([*tasks])[0]:
                try:
                    ray.get(task)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from None
                yield tasks.pop(task)

    return encode
