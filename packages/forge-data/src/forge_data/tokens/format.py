"""The format of a folder of token files, and the checks of its sidecar, sizes and digests.

tokens.bin      raw little-endian ids
documents.bin   little-endian int64: start of each document, in tokens
blocks.bin      sha256 of each block of tokens.bin, 32 bytes each
tokens.json     the sidecar: JSON with the dtype, counts and digests
statistics.json counts of documents, tokens and bytes, for people
tokenizer.json  a copy of the tokenizer, if it is a JSON file
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from forge_data._shared.atomic import write_file
from forge_data._shared.jsonl import parse
from forge_data._shared.paths import read_regular
from forge_data._shared.problems import Problem, invalid, raise_problems
from forge_data.config import DTYPES, SPLITS
from forge_data.errors import InvalidData, invalid_data
from forge_data.io.files import COMPRESSIONS

__all__ = ["check_not_packed", "check_range", "check_split"]

FORMAT = "forge-tokens"
VERSION = 1
TOKENS, DOCUMENTS, BLOCKS = "tokens.bin", "documents.bin", "blocks.bin"
SIDECAR, TOKENIZER = "tokens.json", "tokenizer.json"
STATISTICS = "statistics.json"
_MAX_BYTES = 1 << 20  # of a sidecar or statistics; usual ones have some hundreds
_BLOCK_BYTES = range(1 << 10, (1 << 26) + 1)
PREPARE_AGAIN = "prepare the text again with `forge-data prepare`"
BLOCK_BYTES = 1 << 17  # Linux's readahead reads as much; 256 bytes of digests per MiB of tokens
DIGEST_BYTES = hashlib.sha256().digest_size
_OFFSETS_AT_ONCE = 1 << 22
_SETTLED_NS = 2_000_000_000  # longer than the resolution of time stamps on any file system


@dataclass(frozen=True)
class Sidecar:
    """The content of a sidecar. `tokenizer` is a spec whose path is relative to the folder, or None.

    `block_bytes` is the size of the blocks whose digests are in blocks.bin; None in folders without
    that file.
    """

    dtype: str
    vocab_size: int
    tokenizer: dict[str, Any] | None
    num_tokens: int
    num_documents: int
    max_token_id: int
    sha256: dict[str, str]  # file name -> digest, to find damage when the files are read
    block_bytes: int | None = None

    def write(self, folder: Path) -> None:
        """Write and sync `tokens.json`; the caller syncs the folder and renames it."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        if self.block_bytes is None:
            del content["block_bytes"]
        write_json(folder / SIDECAR, content)


def _classes(hint: Any) -> tuple[type, ...]:
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return tuple(get_origin(kind) or kind for kind in kinds)


#: The classes of each value that every sidecar has; `block_bytes` may be missing, as some folders have no blocks.bin.
_TYPES = {n: _classes(h) for n, h in get_type_hints(Sidecar).items() if n != "block_bytes"}


def read_sidecar(folder: Path) -> Sidecar:
    """The sidecar of a folder, with every key checked. Raises InvalidData naming the wrong ones."""
    path = folder / SIDECAR
    try:
        content = parse(
            read_regular(path, _MAX_BYTES, InvalidData), path, InvalidData, PREPARE_AGAIN
        )
    except FileNotFoundError:
        raise _missing(path) from None

    if not isinstance(content, dict) or content.get("format") != FORMAT:
        rule = f'must be "{FORMAT}"'
        raise invalid_data("format", "unknown", ..., rule, PREPARE_AGAIN, where=path)
    if (version := content.get("version")) != VERSION:
        rule = f"must be {VERSION}, which this forge-data reads"
        fix = f"update forge-data or {PREPARE_AGAIN}"
        raise invalid_data("version", "version", version, rule, fix, where=path)

    wrong = [
        Problem(k, "type", content.get(k, ...), "is missing or of another type", PREPARE_AGAIN)
        for k, t in _TYPES.items()
        if not isinstance(content.get(k, ...), t) or isinstance(content[k], bool)
    ]
    raise_problems(str(path), wrong, InvalidData)
    sidecar = Sidecar(
        **{key: content[key] for key in _TYPES}, block_bytes=content.get("block_bytes")
    )
    raise_problems(str(path), _problems(sidecar), InvalidData)
    return sidecar


def _problems(sidecar: Sidecar) -> Iterator[Problem]:
    """Problems of values that have the right types."""
    again = PREPARE_AGAIN
    if sidecar.dtype not in DTYPES:
        yield Problem(
            "dtype", "unknown", sidecar.dtype, f"must be one of {', '.join(DTYPES)}", again
        )
    files = [TOKENS, DOCUMENTS, *([BLOCKS] if sidecar.block_bytes is not None else [])]
    for name in files:
        if not isinstance(sidecar.sha256.get(name), str):
            yield Problem(f"sha256.{name}", "missing", ..., "must be given", again)

    for key in ("num_tokens", "num_documents"):
        if (count := getattr(sidecar, key)) < 1:
            yield Problem(key, "range", count, "must be at least 1", again)

    if not 0 <= sidecar.max_token_id < sidecar.vocab_size:
        rule = f"must be within 0..vocab_size-1 (vocab_size {sidecar.vocab_size})"
        yield Problem("max_token_id", "range", sidecar.max_token_id, rule, again)
    size = sidecar.block_bytes
    if size is not None and (type(size) is not int or size not in _BLOCK_BYTES):
        yield Problem("block_bytes", "range", size, "must be within 1 KiB and 64 MiB", again)

    spec = sidecar.tokenizer
    if spec is not None and (
        not isinstance(spec.get("name"), str)
        or not all(isinstance(spec.get(k), str | None) for k in ("path", "eos", "fingerprint"))
        or not all(_is_names(spec.get(key, [])) for key in ("bos", "ends"))
    ):
        rule = 'must be null or have a "name" such as "byte"'
        yield Problem("tokenizer", "spec", spec, rule, again)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def read_statistics(folder: Path) -> dict[str, Any] | None:
    """The content of `statistics.json`; None in folders without it, which older versions wrote."""
    try:
        found = json.loads(read_regular(folder / STATISTICS, _MAX_BYTES, InvalidData))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        rule, where = f"must be JSON ({error!s:.80})", folder / STATISTICS
        fix = "remove it, nothing depends on it"
        raise invalid_data("", "not_json", ..., rule, fix, where=where) from None
    return found if isinstance(found, dict) else None


def write_json(path: Path, content: Any) -> None:
    """Write JSON, and sync it."""
    write_file(path, json.dumps(content, indent=2) + "\n")


def check_size(path: Path, count: int, item_size: int) -> None:
    """Raise InvalidData for a missing, truncated or grown file; costs one stat."""
    if not path.is_file():
        rule, fix = "is missing", f"copy it again or {PREPARE_AGAIN}"
        raise invalid_data("", "missing", ..., rule, fix, where=path)
    size, expected = path.stat().st_size, count * item_size
    if size != expected:
        state = "truncated" if size < expected else "grown"
        rule = f"bytes must be {expected}, {count} items of {item_size}, by its sidecar: it was {state}"
        fix = f"copy it again or {PREPARE_AGAIN}"
        raise invalid_data("", "length", size, rule, fix, where=path)


def _missing(path: Path) -> Any:
    """Return the error of a missing sidecar: lost, or the folder is above token files, or unrelated."""
    folder = path.parent
    if (folder / TOKENS).exists():
        rule = f"is missing, and {TOKENS} cannot be read without it"
        return invalid_data("", "lost", ..., rule, PREPARE_AGAIN, where=path)
    below = {found.parent for found in folder.glob(f"*/{SIDECAR}")}
    below |= {found.parent.parent for found in folder.glob(f"*/train/{SIDECAR}")}
    names = ", ".join(map(str, sorted(below)[:3]))
    fix = f"name one below it, such as {names}" if below else "check the path"
    rule = f"must be a folder of token files, and has no {path.name}"
    return invalid_data("", "no_tokens", ..., rule, fix, where=folder)


def waiting_parts(output: Path) -> str:
    """Say where the unfinished chunks of an output are; "" if there are none."""
    parts = output.with_name(f"{output.name}.parts")
    if not (output.name and parts.is_dir()):
        return ""
    return f" (its parts are in {parts}: end the `forge-data prepare` of each, and with --shard `forge-data merge`)"


class VerifiedBlocks:
    """The blocks of a file, each compared with its recorded sha256 when it is first touched.

    `digests` is a file of 32 bytes a block. Cost: the first touch of a block reads and hashes it, in
    each process; later ones search a bytearray of one byte a block.
    Usage: `VerifiedBlocks(tokens, digests, 1 << 17).touch(0, 4096)`.
    """

    def __init__(self, path: Path, digests: Path, block_bytes: int) -> None:
        self.path = path
        self.block_bytes = block_bytes
        self._digests = np.memmap(digests, np.uint8, mode="r").reshape(-1, DIGEST_BYTES)
        self._verified = bytearray(len(self._digests))

    def touch(self, start: int, stop: int) -> None:
        """Check the blocks of bytes start..stop-1. Raises InvalidData naming the first damaged one."""
        last = -(-stop // self.block_bytes)
        block = self._verified.find(0, start // self.block_bytes, last)
        if block < 0:
            return
        with self.path.open("rb") as file:
            while block >= 0:
                # Read, not through the map: a failing disk raises OSError here; in the map it is a
                # SIGBUS, which ends the process. The page cache then serves the map.
                file.seek(block * self.block_bytes)
                content = file.read(self.block_bytes)
                if hashlib.sha256(content).digest() != self._digests[block].tobytes():
                    begin = block * self.block_bytes
                    last_byte, fix = begin + len(content) - 1, "copy the file again"
                    rule = f"(bytes {begin}..{last_byte}) must have the sha256 of when it was written: it was damaged"
                    raise invalid_data("block", "damaged", block, rule, fix, where=self.path)
                self._verified[block] = 1
                block = self._verified.find(0, block + 1, last)

    def touch_all(self) -> None:
        """Check every block."""
        self.touch(0, len(self._verified) * self.block_bytes)


def check_digest(path: Path, recorded: str) -> None:
    """Raise InvalidData unless the file has the recorded sha256. Reads it once in a process."""
    if digest_once(path) != recorded:
        rule, fix = "must be the one of its sidecar", "copy it again"
        raise invalid_data("sha256", "mismatch", ..., rule, fix, where=path)


def digest_once(path: Path) -> str:
    """sha256 of a file, which is read once in a process as long as it does not change."""
    status = path.stat()
    # A file that changed just now may change again within the same time stamp: do not cache its digest.
    settled = time.time_ns() - status.st_ctime_ns > _SETTLED_NS
    state = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return _digest_once(path, state) if settled else digest_of(path)


@functools.lru_cache(maxsize=64)
def _digest_once(path: Path, state: tuple[int, ...]) -> str:
    """sha256 of a file, computed once for each `state`: a job opens a source several times."""
    return digest_of(path)


def digest_of(path: Path) -> str:
    """sha256 of a file, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_offsets(path: Path, documents: np.ndarray, num_tokens: int) -> None:
    """Raise InvalidData unless documents (num_documents,) rise from 0 to under `num_tokens`."""
    found = (0, "must be 0") if documents[0] != 0 else None
    for first in range(0, len(documents), _OFFSETS_AT_ONCE):
        # each overlaps the next by one, so that all neighbors are compared
        part = documents[first : first + _OFFSETS_AT_ONCE + 1]
        falls = np.flatnonzero(part[1:] <= part[:-1])  # not a difference, which could overflow
        if falls.size and not found:
            i = first + int(falls[0]) + 1
            found = i, f"must be above {documents[i - 1]}"
    if documents[-1] >= num_tokens and not found:
        found = len(documents) - 1, f"must be below the {num_tokens} tokens"
    if found:
        value, fix = (found[0], int(documents[found[0]])), "copy the file again"
        rule = f"is a document and its offset, which {found[1]}: it was damaged"
        raise invalid_data("", "order", value, rule, fix, where=path)


def check_not_packed(path: Path) -> None:
    """Raise InvalidData for the name of a packed file: its bytes would be read as ids."""
    if name := COMPRESSIONS.get(path.suffix.lower()):
        rule = f"must be a file of ids that can be mapped, and ends as one of {name}"
        raise invalid_data("path", "packed", str(path), rule, "unpack it first")


def check_split(split: str) -> None:
    """Raise ValueError unless `split` is one of SPLITS."""
    if split not in SPLITS:
        rule = 'must be "train" or "validation"'
        raise invalid("split", "unknown", split, rule, 'use "train"')


def folder_of_split(path: Path, split: str, fix: str) -> Path:
    """`path/split` of a folder with splits, else `path`. Raises InvalidData for a split that is not there; `fix` makes it."""
    name = str(path)
    if any((path / folder).is_dir() for folder in SPLITS):
        if not (path / split).is_dir():
            rule = f"must hold a folder {split}/"
            raise invalid_data("path", "no_split", name, rule, fix)
        return path / split
    if split == "validation":
        rule = "must hold train/ and validation/ for split validation"
        fix = f"{fix}, or give validation a path of its own with split train"
        raise invalid_data("path", "no_splits", name, rule, fix)
    return path


def check_range(start: int, stop: int, num_tokens: int) -> None:
    """Raise ValueError unless tokens start..stop-1 are inside a source of `num_tokens`."""
    if not 0 <= start <= stop <= num_tokens:
        rule = f"must be within 0..{num_tokens}"
        raise invalid("range", "range", (start, stop), rule, "ask for less")
