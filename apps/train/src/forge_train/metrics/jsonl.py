"""metrics.jsonl: written so that a full disk costs a warning, and read so that torn and foreign lines cost themselves."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_resilience.journal import read_json_lines
from forge_train._shared.atomic import write_file
from forge_train.metrics.columns import SCHEMA

if TYPE_CHECKING:  # imports torch, which readers of a run do not need
    from forge_train.protocols import Row

#: Bytes of rows that wait in memory while the disk takes none: days of training.
_MAX_WAITING = 64 * 2**20


class JsonlSink:
    """One JSON object per line and row. Rows after `resume_step` of an earlier life are removed.

    Rows that cannot be written (a full disk, a quota) wait in memory, up to 64 MiB of them, and are written with the
    first row for which there is space; a line on stderr says so once.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        _keep_rows(path, resume_step)
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._waiting = b""
        self._warned = False

    def write(self, row: Row) -> None:
        if len(self._waiting) < _MAX_WAITING:
            self._waiting += (json.dumps(row) + "\n").encode()
        with self._warning_once():
            while self._waiting:  # a write that stops inside of a line goes on there
                self._waiting = self._waiting[os.write(self._file, self._waiting) :]

    def flush(self) -> None:
        """Bring the rows onto the disk."""
        with self._warning_once():
            os.fsync(self._file)

    def close(self) -> None:
        self.flush()
        os.close(self._file)

    @contextlib.contextmanager
    def _warning_once(self) -> Any:
        try:
            yield
        except OSError as error:
            if not self._warned:
                warn(f"{self._path}: {error.strerror}; rows wait in memory, training goes on")
            self._warned = True


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a metrics file, one after the other; a missing file has none. A line that a kill tore is left out, and
    one that is JSON but no row (an object with a number `step`) with one warning on stderr behind the last row; so is told
    that rows have a later schema."""
    foreign = later = newest = 0
    for row in read_json_lines(path):
        if not isinstance(row, dict) or type(row.get("step")) not in (int, float):
            foreign += 1
            continue
        if type(schema := row.get("schema")) is int and schema > SCHEMA:
            later, newest = later + 1, max(newest, schema)
        yield row
    if foreign:
        warn(f"{path}: {foreign} lines that are no rows of metrics were left out")
    if later:
        warn(
            f"{path}: {later} rows have the schema {newest}, and this version knows up to {SCHEMA}: columns may mean "
            "other things; read them with a newer forge-train"
        )


def warn(message: str) -> None:
    """A line on stderr."""
    # a closed stderr must not stop a run, nor one that is None
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.write(sys.stderr.fileno(), f"forge-train: {message}\n".encode())


def _keep_rows(path: Path, last_step: int) -> None:
    """Drop rows after `last_step`, and lines that are no rows."""
    if not path.exists():
        return
    rows = [json.dumps(row) + "\n" for row in read_rows(path) if row["step"] <= last_step]
    write_file(path, "".join(rows))
