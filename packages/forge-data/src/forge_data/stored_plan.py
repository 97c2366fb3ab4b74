"""Packing plans in files, memory-mapped: made by one process, while others wait.

    $FORGE_CACHE/plans/KEY/ (default ~/.cache/forge/plans/KEY/)
        rows.bin, documents.bin, starts.bin, stops.bin     int64, see PackingPlan
        plan.json                                          sha256 of each, counts

KEY is a digest of all that the plan is a function of: document offsets, policy, window, length of a row, version.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forge_data._shared.atomic import new_folder, write_file
from forge_data._shared.cache import digest_of, entry_of, once
from forge_data._shared.hashed_files import HashedFile
from forge_data._shared.paths import read_regular
from forge_data.packing_config import PackingConfig
from forge_data.packing_plan import PARTS, PLAN_VERSION, PackingPlan, digest_of_parts, plan_windows
from forge_data.protocols import Source
from forge_data.tokens.format import check_digest

__all__ = ["StoredPlan", "open_plan"]

_HEADER = "plan.json"
_AT_ONCE = 1 << 20  # offsets per call of the hash: 8 MB, however many documents there are
_HEADER_BYTES = 1 << 16


@dataclass(frozen=True)
class StoredPlan(PackingPlan):
    """A plan in a folder: arrays are mapped, counts are read. A copy in another process maps the same files."""

    folder: Path
    header: dict[str, Any]

    @property
    def num_tokens(self) -> int:
        """As recorded."""
        return int(self.header["num_tokens"])

    @property
    def num_cut(self) -> int:
        """As recorded."""
        return int(self.header["num_cut"])

    @property
    def policy(self) -> str:
        """Name, window and version."""
        return "{policy}-{version} in windows of {window}".format(**self.header)

    @property
    def digest(self) -> str:
        """Of the recorded sha256."""
        return digest_of_parts(self.header["sha256"])

    def __reduce__(self) -> tuple[Any, ...]:
        return _mapped, (self.folder, self.header)


def open_plan(source: Source, seq_len: int, packing: PackingConfig) -> StoredPlan:
    """The plan of a source's documents; made if it is not in the cache, or is damaged there.

    One process writes it, and others wait (`cache.once`). Opening compares all of it with its digests: one read of 24
    bytes a piece. Making it takes the memory of one window. Raises ValueError for a cache that cannot be written.
    Usage: `open_plan(source, 2048, PackingConfig("best_fit")).utilization`.
    """
    known = {
        "version": PLAN_VERSION,
        "policy": packing.name,
        "window": packing.window,
        "seq_len": seq_len,
        "num_tokens": source.num_tokens,
        "documents": _digest_of_documents(source),
    }
    folder = entry_of("plans", digest_of(known))

    def write() -> None:
        with new_folder(folder) as temporary:
            _write(temporary, source, known)

    return once(folder, lambda: _existing(folder, known), write, what="packing plan")


def _digest_of_documents(source: Source) -> str:
    """The recorded digest of the document offsets, or that of the offsets themselves."""
    recorded = source.fingerprint().get("documents")
    if recorded is not None:
        return str(recorded)
    digest = hashlib.sha256()
    for first in range(0, source.num_documents, _AT_ONCE):
        digest.update(np.ascontiguousarray(source.documents[first : first + _AT_ONCE], "<i8").data)
    return digest.hexdigest()


def _existing(folder: Path, known: dict[str, Any]) -> StoredPlan:
    """The plan in a folder. Raises an error of a damaged entry for another plan or other content."""
    header = json.loads(read_regular(folder / _HEADER, _HEADER_BYTES))
    for name, value in known.items():
        if header[name] != value:
            raise ValueError(f"{folder / _HEADER}: {name} {header[name]!r} must be {value!r}")
    for name in PARTS:
        check_digest(folder / f"{name}.bin", header["sha256"][name])
    return _mapped(folder, header)


def _mapped(folder: Path, header: dict[str, Any]) -> StoredPlan:
    # Plain arrays over the maps: indexing a memmap costs microseconds more.
    arrays = {n: np.asarray(np.memmap(folder / f"{n}.bin", "<i8", mode="r")) for n in PARTS}
    return StoredPlan(int(header["seq_len"]), **arrays, folder=folder, header=header)


def _write(folder: Path, source: Source, known: dict[str, Any]) -> None:
    """Plan window by window into files."""
    window, num_pieces, num_cut, num_rows = known["window"], 0, 0, 0
    with contextlib.ExitStack() as stack:
        files = {n: HashedFile(folder / f"{n}.bin") for n in PARTS}
        for file in files.values():
            stack.callback(file.close)

        def add(name: str, values: np.ndarray) -> None:
            files[name].write(np.ascontiguousarray(values, "<i8").data)

        for first in range(0, source.num_documents, window):
            starts = np.asarray(source.documents[first : first + window + 1], np.int64)
            if len(starts) <= window:
                starts = np.append(starts, source.num_tokens)
            (part,) = plan_windows(np.diff(starts), known["seq_len"], known["policy"], window)
            add("rows", part.rows[:-1] + num_pieces)
            add("documents", part.documents + first)
            add("starts", part.starts)
            add("stops", part.stops)
            num_pieces += len(part.documents)
            num_cut += part.num_cut
            num_rows += part.num_rows

        add("rows", np.array([num_pieces]))
        digests = {name: file.finish() for name, file in files.items()}
    header = {**known, "num_rows": num_rows, "num_cut": num_cut, "sha256": digests}
    write_file(folder / _HEADER, json.dumps(header))
