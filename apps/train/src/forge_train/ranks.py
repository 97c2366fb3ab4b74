"""The ranks of a verb: started on this machine, or met as a launcher started them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from forge_parallel import Meshes, ParallelConfig, StartError, launch
from forge_train._shared.problems import problems_of
from forge_train.errors import JobError


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
