"""The work of `prepare` as a list of chunks, planned before anything is read: ranges of files, in the order of the output."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from forge_data._renamed import renamed
from forge_data.errors import invalid_data
from forge_data.io.parquet import row_group_bytes
from forge_data.prepare.read import format_of

__all__ = ["Chunk", "FileRange", "Plan", "Settings", "changed_meanwhile", "make_plan", "read_plan"]

_VERSION = 1  # of chunk files: raise it when a file would give other documents, so that old chunks are not used
SMALLEST, LARGEST = 1 << 20, 1 << 26  # bytes of text in a chunk: what a kill can lose per worker
_CHUNKS = 64  # of small inputs, so that all workers get some
_UNPACKED_RATIO = 4  # text in a packed file, of its size: a guess, as only unpacking it would tell
_LINE_END = {"line": re.compile(rb"\n"), "blank_line": re.compile(rb"\n\r?\n")}
_SCAN = 1 << 16


@dataclass(frozen=True)
class Settings:
    """All settings that determine the output, except the inputs. `tokenizer` is a spec without its folder."""

    tokenizer: dict[str, Any]
    vocab_size: int
    document: str
    text_field: str
    validation_every: int
    validation_fraction: float
    deduplicate: bool
    ignore_keys: list[str] = field(default_factory=list)
    strict: bool = False


class FileRange(NamedTuple):
    """A range of a file (see `read_documents`), or all of it; `size` is its part of the file's bytes.

    `state` is the file's size and time of change when it was planned.
    """

    path: str
    range: tuple[int, int] | None
    size: int
    state: tuple[int, int]

    def check_unchanged(self) -> None:
        """Raise InvalidData if the file changed since planning."""
        if _state(os.stat(self.path)) != self.state:
            raise changed_meanwhile(self.path)


def changed_meanwhile(path: str | Path) -> Any:
    """Return the error of a file that is still written."""
    rule, fix = "must not change while it is tokenized", "start again when it is complete"
    return invalid_data("", "changed", ..., rule, fix, where=path)


class Chunk(NamedTuple):
    """Consecutive file ranges that are tokenized together. `key` names the chunk's file: a digest of all that
    determines the content."""

    key: str
    ranges: tuple[FileRange, ...]

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(r.size for r in self.ranges)

    def __str__(self) -> str:
        first, more = self.ranges[0], len(self.ranges) - 1
        where = "" if first.range is None else f" {first.range[0]}..{first.range[1] - 1}"
        return f"{first.path}{where}" + (f" and {more} more" if more else "")


@dataclass(frozen=True)
class Plan:
    """Chunks in the order of the output, and what is done with them; `shards` 1 if they are not divided."""

    settings: Settings
    chunks: tuple[Chunk, ...]
    shards: int = 1

    def of_shard(self, shard: int) -> list[Chunk]:
        """The chunks of one shard: consecutive, of about equal bytes."""
        total, before, mine = max(1, sum(chunk.size for chunk in self.chunks)), 0, []
        for chunk in self.chunks:
            # The middle of a chunk decides, so each chunk has one shard.
            middle = 2 * before + chunk.size
            if min(self.shards - 1, self.shards * middle // (2 * total)) == shard:
                mine.append(chunk)
            before += chunk.size
        return mine

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "version": _VERSION,
            "shards": self.shards,
            "settings": asdict(self.settings),
            "units": [[chunk.key, [list(r) for r in chunk.ranges]] for chunk in self.chunks],
        }

    @classmethod
    def from_json(cls, content: Any) -> Plan:
        """The plan of plain data. Raises KeyError, TypeError or ValueError for other data."""
        if content["version"] != _VERSION:
            raise ValueError(f"version {content['version']!r:.40}")
        chunks = [
            Chunk(
                key,
                tuple(FileRange(p, r and (r[0], r[1]), n, (s[0], s[1])) for p, r, n, s in ranges),
            )
            for key, ranges in content["units"]
        ]
        return cls(Settings(**content["settings"]), tuple(chunks), content["shards"])


def make_plan(files: Sequence[Path], settings: Settings, shards: int = 1) -> Plan:
    """Divide files into chunks, by their sizes and times of change alone.

    Plain text of lines and paragraphs is divided at ends of documents, parquet at row groups; packed files
    and files that are one document are not divided. Cost: a stat of each file, 64 KiB of text for each chunk,
    the footer of each parquet file. Raises InvalidData for parquet that cannot be read.
    """
    paths = [file.absolute() for file in files]
    states = [path.stat() for path in paths]
    total = sum(state.st_size for state in states)
    chunk_bytes = min(LARGEST, max(SMALLEST, 1 << (total // _CHUNKS).bit_length()))
    chunks: list[Chunk] = []
    ranges: list[FileRange] = []
    identities: list[Any] = []
    weight = 0

    def end() -> None:
        nonlocal weight
        if ranges:
            chunks.append(Chunk(_key(settings, identities), tuple(ranges)))
        weight = 0
        ranges.clear()
        identities.clear()

    for path, state in zip(paths, states, strict=True):
        for file_range, text_bytes in _file_ranges(path, _state(state), settings, chunk_bytes):
            if ranges and weight + text_bytes > chunk_bytes:
                end()
            ranges.append(file_range)
            identities.append([file_range.path, file_range.range, *file_range.state])
            weight += text_bytes
    end()
    return Plan(settings, tuple(chunks), shards)


def _key(settings: Settings, identities: Sequence[Any]) -> str:
    tokenizer = {name: settings.tokenizer.get(name) for name in ("name", "eos", "fingerprint")}
    if "bos" in settings.tokenizer:  # older plans have none, and their keys must stay as they are
        tokenizer["bos"] = settings.tokenizer["bos"]
    content = [_VERSION, tokenizer, settings.document, settings.text_field, list(identities)]
    if settings.ignore_keys or settings.strict:  # without them a chunk may be of an older version
        content += [settings.ignore_keys, settings.strict]
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()


def _state(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def _file_ranges(
    path: Path, state: tuple[int, int], settings: Settings, chunk_bytes: int
) -> Iterator[tuple[FileRange, int]]:
    """Ranges of a file, each with about its bytes of text."""
    size = state[0]
    kind, compression = format_of(path)
    if kind == "parquet" and not compression:
        yield from _row_groups(path, state, settings.text_field, chunk_bytes)
        return
    # A line end in a quoted field of CSV ends no row. All kinds stand here, so that a new one raises.
    documents = {"text": settings.document, "records": "line", "csv": "file", "parquet": "file"}
    document = documents[kind]
    if compression or document == "file" or size <= chunk_bytes:
        yield (
            FileRange(str(path), None, size, state),
            size * (_UNPACKED_RATIO if compression else 1),
        )
        return
    start = 0
    for stop in _boundaries(path, size, _LINE_END[document], chunk_bytes):
        yield FileRange(str(path), (start, stop), stop - start, state), stop - start
        start = stop


def _boundaries(
    path: Path, size: int, pattern: re.Pattern[bytes], chunk_bytes: int
) -> Iterator[int]:
    """Positions after `pattern` that are at least `chunk_bytes` apart, and the size."""
    with path.open("rb") as file:
        wanted = chunk_bytes
        while wanted < size:
            found = _find_after(file, wanted, pattern)
            if found is None or found >= size:
                break
            yield found
            wanted = found + chunk_bytes
    yield size


def _find_after(file: Any, start: int, pattern: re.Pattern[bytes]) -> int | None:
    """The end of the first match after byte `start`, None without one."""
    tail, position = b"", start
    file.seek(start)
    while block := file.read(_SCAN):
        found = pattern.search(tail + block)
        if found:
            return position - len(tail) + found.end()
        tail = (tail + block)[-2:]
        position += len(block)
    return None


def _row_groups(
    path: Path, state: tuple[int, int], column: str, chunk_bytes: int
) -> Iterator[tuple[FileRange, int]]:
    """Runs of row groups of about `chunk_bytes`."""
    size = state[0]
    groups = row_group_bytes(path, column)
    total, first, weight, reported = max(1, sum(groups)), 0, 0, 0
    before = 0
    for i, group in enumerate(groups):
        weight += group
        last = i == len(groups) - 1
        if last or weight + groups[i + 1] > chunk_bytes:
            before += weight
            end = size * before // total if not last else size
            yield FileRange(str(path), (first, i + 1), end - reported, state), weight
            first, weight, reported = i + 1, 0, end


def read_plan(path: Path) -> Plan | None:
    """The plan in a file, None if there is no file. Raises InvalidData for other content."""
    try:
        return Plan.from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        rule = f"must be a plan of this forge-data ({type(error).__name__}: {error!s:.80})"
        fix = "remove its folder and prepare again"
        raise invalid_data("", "damaged", ..., rule, fix, where=path) from None


__getattr__ = partial(renamed, __name__)
