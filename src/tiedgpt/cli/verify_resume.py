"""`tiedgpt train ... --verify-resume`: shows whether stopping changes anything on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

from tiedgpt.errors import EXIT_OK, CheckFailedError
from tiedgpt.train.options import TrainOptions


def verify_resume(options: TrainOptions, out: Path) -> int:
    """Print what a killed and resumed run and an unbroken one left; `CheckFailedError` if unlike.

    Nothing is left in `out` or beside it.
    """
    from tiedgpt.train.rehearsal import rehearse

    unbroken, resumed = rehearse(options, out, lambda line: print(line, file=sys.stderr))
    unlike = [name for name, digest in unbroken.items() if resumed[name] != digest]
    for name, digest in unbroken.items():
        same = "!=" if name in unlike else "="
        print(f"{name:<22} {digest[:16]} {same} {resumed[name][:16]}")
    if unlike:
        raise CheckFailedError(
            f"a resumed run differs from an unbroken one in {', '.join(unlike)}: the products are "
            "not repeatable here; try OMP_NUM_THREADS=1 or --dtype fp32"
        )
    print("a run that is killed and resumed equals one that never stopped, bit for bit")
    return EXIT_OK
