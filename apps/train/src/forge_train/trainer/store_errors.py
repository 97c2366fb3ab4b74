"""The one boundary around forge-ckpt: what it raises becomes a JobError of one line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import forge_data
from forge_ckpt import CheckpointMismatch, CorruptCheckpoint, StoreInUse
from forge_train.errors import ConfigError, DataError, JobError, StateError


@contextlib.contextmanager
def store_errors(checkpoints: Path, unusable: type[JobError]) -> Iterator[None]:
    """Around a call of the store of `checkpoints`; `unusable` is raised where the disk or the values refuse."""
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
    except forge_data.DataError as error:  # other data than the checkpoint's
        raise DataError([f"{checkpoints}: {error}"]) from error
    except OSError as error:
        file = "" if error.filename is None else f" ({error.filename})"
        raise unusable([f"{checkpoints}: {error.strerror or error}{file}"]) from error
    except ValueError as error:
        raise unusable([f"{checkpoints}: {error}"]) from error
