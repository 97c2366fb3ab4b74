"""Exceptions of forge_ckpt as errors of a job."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
from collections.abc import Iterator
from pathlib import Path

import forge_data
from forge_ckpt import CheckpointMismatch, CorruptCheckpoint, StoreInUse
from forge_train._shared.problems import Problem, invalid, problems_of
from forge_train.errors import ConfigError, DataError, JobError, StateError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def problems_at(error: BaseException, origin: object) -> list[Problem]:
    """The problems of an error, with what gave their values: `origin`, and the file that the error is about."""
    places = ", ".join(str(place) for place in (origin, getattr(error, "where", "")) if place)
    return [dataclasses.replace(p, origin=p.origin or places) for p in problems_of(error)]


@contextlib.contextmanager
def store_errors(
    checkpoints: Path, unusable: type[JobError], corrupt: type[JobError] = StateError
) -> Iterator[None]:
    """Turn an exception of forge_ckpt into a JobError of one line; `unusable` if disk or values are the cause, but for a
    disk that is full."""
    try:
        yield
    except StoreInUse as error:
        folder, rule = str(checkpoints.parent), f"is in use: {error}"
        raise invalid("run.dir", "in_use", folder, rule, kind=ConfigError) from error
    except CheckpointMismatch as error:
        fix = "choose another run.dir, if they are of another job"
        raise ConfigError([*problems_at(error, checkpoints), fix]) from error
    except CorruptCheckpoint as error:
        raise corrupt(problems_at(error, "")) from error
    except forge_data.InvalidData as error:  # the checkpoint's data is not the run's
        raise DataError(problems_at(error, checkpoints)) from error
    except OSError as error:
        file = "" if error.filename is None else f" ({error.filename})"
        kind = JobError if error.errno in _FULL else unusable
        raise kind([f"{checkpoints}: {error.strerror or error}{file}"]) from error
    except ValueError as error:
        kind = JobError if getattr(error.__cause__, "errno", None) in _FULL else unusable
        raise kind(problems_at(error, checkpoints)) from error
