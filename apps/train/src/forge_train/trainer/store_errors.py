"""Exceptions of forge_ckpt as errors of a job."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import forge_data
from forge_ckpt import CheckpointMismatch, CorruptCheckpoint, StoreInUse
from forge_train.errors import ConfigError, DataError, JobError, StateError


@contextlib.contextmanager
def store_errors(checkpoints: Path, unusable: type[JobError]) -> Iterator[None]:
    """Turn an exception of forge_ckpt into a JobError of one line; `unusable` if disk or values are the cause."""
    try:
        yield
    except StoreInUse as error:
        raise ConfigError([f"run.dir {checkpoints.parent} is in use: {error}"]) from error
    except CheckpointMismatch as error:
        raise ConfigError(
            [f"{checkpoints}: {error}", "choose another run.dir, if they are of another job"]
        ) from error
    except CorruptCheckpoint as error:
        raise StateError([str(error)]) from error
    except forge_data.InvalidData as error:  # the checkpoint's data is not the run's
        raise DataError([f"{checkpoints}: {error}"]) from error
    except OSError as error:
        file = "" if error.filename is None else f" ({error.filename})"
        raise unusable([f"{checkpoints}: {error.strerror or error}{file}"]) from error
    except ValueError as error:
        raise unusable([f"{checkpoints}: {error}"]) from error
