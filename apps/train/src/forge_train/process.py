"""The end of a command's process, and the rank that prints an error of many."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from forge_resilience.rank_process import is_rank_of_many
from forge_resilience.stop import leave_on_signal
from forge_train._shared.problems import problems_of
from forge_train.errors import ConfigError, DataError, JobError

if TYPE_CHECKING:
    from forge_parallel import Meshes, ParallelConfig

_LONGEST = 4000  # characters of a sentence: a user's value may have a megabyte


def end(code: int, is_run: bool, has_ranks: bool) -> NoReturn:
    """Flush the output and leave with `code`, at once if a signal comes meanwhile: it has nothing to stop any more.

    has_ranks: the verb joins a process group under a launcher.
    """
    if is_run:
        leave_on_signal(code, signal.SIGINT)
    sys.stdout.flush()
    if has_ranks and is_rank_of_many():
        from forge_parallel import leave

        leave(code)
    gc.freeze()  # at exit Python looks for cycles in all that torch imported: 0.6 s of a refusal
    sys.exit(code)


@contextlib.contextmanager
def init_ranks(config: ParallelConfig, facts: Mapping[str, str] | None = None) -> Iterator[Meshes]:
    """`launch`, whose StartError is a JobError; a JobError of the block is one of all ranks, printed by the first."""
    from forge_parallel import StartError, launch

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


def lines_of_this_rank(error: JobError) -> Sequence[str]:
    """The lines that this process prints: rank 0 prints errors of all ranks, and each rank its own, with its number.

    Configuration and data are read before the ranks have met: one rank of each host prints those problems, as
    another host may have other files.
    """
    if not is_rank_of_many():
        return error.lines
    from forge_parallel import find_world

    try:
        world = find_world()
    except ValueError:  # the environment was the problem
        return error.lines
    of_the_host = isinstance(error, ConfigError | DataError)
    if world.rank == 0 and (error.shared or of_the_host):
        return error.lines
    if error.shared or (of_the_host and world.local_rank > 0):
        return ()
    return [f"rank {world.rank}: {line}" for line in error.lines]


def problems_of_a_lost_rank(error: Exception) -> Sequence[str] | None:
    """The problems that a rank prints when another rank is gone; None for any other error.

    Rank 0 prints a line, and the launcher names the rank that is gone; without a launcher every rank prints one.
    """
    if not is_rank_of_many() or not isinstance(error, RuntimeError):
        return None
    from forge_parallel import find_world
    from forge_parallel.start import lost_rank

    cause = lost_rank(error)
    if cause is None:
        return None
    world = find_world()
    if world.rank > 0 and (world.launcher != "environment" or "FORGE_NPROC" in os.environ):
        return ()
    return [f"rank {world.rank}: another rank is gone ({cause}); what was saved before is intact"]


def print_error(error: JobError) -> int:
    """Print an error as `lines_of_this_rank` has it, or as a parser printed it; its exit code."""
    if not error.printed or is_rank_of_many():
        return fail(lines_of_this_rank(error), error.exit_code)
    sys.stderr.write(error.printed)
    return error.exit_code


def fail(problems: Sequence[str], code: int) -> int:
    """Print problems to stderr; returns `code`."""
    for problem in problems:
        note(problem[:_LONGEST])
    return code


def note(line: str) -> None:
    """Print a line for a person to stderr."""
    print(f"forge-train: {line}", file=sys.stderr)
