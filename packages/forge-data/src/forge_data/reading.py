"""Rows of a step are read from a stream; an error of its code names the source and the instance."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from forge_data._shared.problems import invalid
from forge_data.errors import InvalidData
from forge_data.ledger import Ledger
from forge_data.mixed_stream import source_names
from forge_data.protocols import Stream


@dataclass(frozen=True)
class Steps:
    """The instances of one rank in the steps from `cursor` on: `ids(0)` are those of the next step, int64 (rows,).

    rows    of the rank, offsets in a global batch
    ledger  says which instances are left out
    until   position at which rows of another length begin, which these steps do not reach
    """

    cursor: int
    global_batch: int
    rows: np.ndarray
    ledger: Ledger
    until: int | None

    def ids(self, step: int) -> np.ndarray:
        positions = self.cursor + step * self.global_batch + self.rows
        if self.until is not None:
            positions = positions[positions < self.until]
        ids: np.ndarray = self.ledger.ids(positions)
        return ids


def read_rows(stream: Stream, ids: np.ndarray) -> Mapping[str, Any]:
    """`stream.arrays(ids)`.

    Raises InvalidData as it is, and any other error of the stream's code as InvalidData of one line that names the
    first instance that it cannot read, its source and the line of code; instances are then read once more, one by one.
    """
    try:
        return stream.arrays(ids)
    except (InvalidData, MemoryError):
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        rule = f"could not be read, as the code of its source raised {type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
        where, fix = _first_bad(stream, ids), "correct it"
        raise invalid("", "source_error", ..., rule, fix, where=where, kind=InvalidData) from error


def name_instances(stream: Stream, ids: np.ndarray) -> str:
    """Words for some instances: `instances 8..11 of source books, web`."""
    if not len(ids):
        return "no instance"
    first, last = int(ids.min()), int(ids.max())
    what = f"instance {first}" if first == last else f"instances {first}..{last}"
    return f"{what} of source {', '.join(source_names(stream, ids))}"


def _first_bad(stream: Stream, ids: np.ndarray) -> str:
    """The first instance that cannot be read by itself; all of them if each can."""
    for i in range(len(ids)):
        try:
            stream.arrays(ids[i : i + 1])
        except Exception:
            return name_instances(stream, ids[i : i + 1])
    return name_instances(stream, ids)
