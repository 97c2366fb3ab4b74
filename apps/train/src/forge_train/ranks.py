"""The ranks of a verb: started on this machine, or met as a launcher started them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence

from forge_parallel import Meshes, ParallelConfig, StartError, launch
from forge_resilience.local_workers import run_local_workers
from forge_train._shared.problems import problems_of
from forge_train.errors import JobError


def start_ranks(verb: str, args: Sequence[str], nproc: int) -> int:
    """Run `forge-train VERB ARGS` in `nproc` processes, without a watch; their exit code."""
    command = [sys.executable, "-m", "forge_train", verb, *args]
    return run_local_workers(command, nproc, {**os.environ, "FORGE_NPROC": str(nproc)})


@contextlib.contextmanager
def init_ranks(config: ParallelConfig, facts: Mapping[str, str] | None = None) -> Iterator[Meshes]:
    """`launch`, whose StartError is a JobError; a JobError of the block is one of all ranks, printed by the first."""
    try:
        with launch(config, facts) as meshes:
            yield meshes
    except StartError as error:
        failure = JobError(problems_of(error), getattr(error, "where", ""))
        failure.shared = error.shared
        raise failure from error
    except JobError as error:
        error.shared = True
        raise
