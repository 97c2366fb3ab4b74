"""The sidecar of a token file: JSON with the dtype, counts and digests.

tokens.bin      raw little-endian ids
documents.bin   little-endian int64: start of each document, in tokens
blocks.bin      sha256 of each block of tokens.bin, 32 bytes each
tokens.json     this sidecar
tokenizer.json  a copy of the tokenizer, if it is a JSON file
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forge_data._shared.atomic import write_file
from forge_data._shared.jsonl import parse
from forge_data._shared.paths import read_regular
from forge_data._shared.problems import Problem, invalid, raise_problems
from forge_data.config import DTYPES
from forge_data.errors import InvalidData

FORMAT = "forge-tokens"
VERSION = 1
TOKENS, DOCUMENTS, BLOCKS, SIDECAR, TOKENIZER = (
    "tokens.bin",
    "documents.bin",
    "blocks.bin",
    "tokens.json",
    "tokenizer.json",
)
ITEM_SIZE = {"uint8": 1, "uint16": 2, "uint32": 4, "int32": 4, "int64": 8}
_MAX_BYTES = 1 << 20  # of a sidecar; usual ones have some hundreds
_BLOCK_BYTES = range(1 << 10, (1 << 26) + 1)
PREPARE_AGAIN = "prepare the text again with `forge-data prepare`"


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
    sha256: dict[str, str]  # file name -> digest
    block_bytes: int | None = None

    def write(self, folder: Path) -> None:
        """Write and sync `tokens.json`; the caller syncs the folder and renames it."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        if self.block_bytes is None:
            del content["block_bytes"]
        write_file(folder / SIDECAR, json.dumps(content, indent=2) + "\n")


_TYPES: dict[str, type | tuple[type, ...]] = {
    "dtype": str,
    "vocab_size": int,
    "tokenizer": (dict, type(None)),
    "num_tokens": int,
    "num_documents": int,
    "max_token_id": int,
    "sha256": dict,
}


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
        raise invalid("format", "unknown", ..., rule, PREPARE_AGAIN, where=path, kind=InvalidData)
    if (version := content.get("version")) != VERSION:
        rule = f"must be {VERSION}, which this forge-data reads"
        fix = f"update forge-data or {PREPARE_AGAIN}"
        raise invalid("version", "version", version, rule, fix, where=path, kind=InvalidData)
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
    for key, count in (
        ("num_tokens", sidecar.num_tokens),
        ("num_documents", sidecar.num_documents),
    ):
        if count < 1:
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


def check_size(path: Path, count: int, item_size: int) -> None:
    """Raise InvalidData for a missing, truncated or grown file; costs one stat."""
    if not path.is_file():
        rule, fix = "is missing", f"copy it again or {PREPARE_AGAIN}"
        raise invalid("", "missing", ..., rule, fix, where=path, kind=InvalidData)
    size, expected = path.stat().st_size, count * item_size
    if size != expected:
        state = "truncated" if size < expected else "grown"
        rule = f"bytes must be {expected}, {count} items of {item_size}, by its sidecar: it was {state}"
        fix = f"copy it again or {PREPARE_AGAIN}"
        raise invalid("", "length", size, rule, fix, where=path, kind=InvalidData)


def _missing(path: Path) -> Any:
    """The error of a sidecar that is not there: it was lost, or the folder is one above token files, or another."""
    folder = path.parent
    if (folder / TOKENS).exists():
        rule = f"is missing, and {TOKENS} cannot be read without it"
        return invalid("", "lost", ..., rule, PREPARE_AGAIN, where=path, kind=InvalidData)
    below = {found.parent for found in folder.glob(f"*/{SIDECAR}")}
    below |= {found.parent.parent for found in folder.glob(f"*/train/{SIDECAR}")}
    names = ", ".join(map(str, sorted(below)[:3]))
    fix = f"name one below it, such as {names}" if below else "check the path"
    rule = f"must be a folder of token files, and has no {path.name}"
    return invalid("", "no_tokens", ..., rule, fix, where=folder, kind=InvalidData)


def waiting_parts(output: Path) -> str:
    """Where what is to become an output waits for the end of `prepare`; "" if nothing does."""
    parts = output.with_name(f"{output.name}.parts")
    if not (output.name and parts.is_dir()):
        return ""
    return f" (its parts are in {parts}: end the `forge-data prepare` of each, and with --shard `forge-data merge`)"
