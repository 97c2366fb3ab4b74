"""The sidecar of a token file: JSON with the dtype, counts and digests.

tokens.bin      raw little-endian ids
documents.bin   little-endian int64: start of each document, in tokens
blocks.bin      sha256 of each block of tokens.bin, 32 bytes each
tokens.json     this sidecar
tokenizer.json  a copy of the tokenizer, if it is a JSON file
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forge_data.bounded_read import read_bounded
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
        with (folder / SIDECAR).open("w", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())


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
    content = _read_json(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InvalidData(f'{path} must have "format": "{FORMAT}"; {PREPARE_AGAIN}')
    if content.get("version") != VERSION:
        raise InvalidData(
            f"{path} has version {str(content.get('version'))[:40]}, this forge-data reads {VERSION}; "
            f"update forge-data or {PREPARE_AGAIN}"
        )
    wrong = [
        k
        for k, t in _TYPES.items()
        if not isinstance(content.get(k, ...), t) or isinstance(content[k], bool)
    ]
    if wrong:
        raise InvalidData(f"{path} must have a valid {', '.join(wrong)}; {PREPARE_AGAIN}")
    sidecar = Sidecar(
        **{key: content[key] for key in _TYPES}, block_bytes=content.get("block_bytes")
    )
    for problem in _problems(sidecar):
        raise InvalidData(f"{path} {problem}; {PREPARE_AGAIN}")
    return sidecar


def _read_json(path: Path) -> Any:
    try:
        return json.loads(read_bounded(path, _MAX_BYTES).decode("utf-8"))
    except FileNotFoundError:
        raise InvalidData(_missing(path)) from None
    except RecursionError:
        raise InvalidData(
            f"{path} must be JSON of a few levels, not nested deep; {PREPARE_AGAIN}"
        ) from None
    except InvalidData:
        raise
    except ValueError as error:  # no JSON, no UTF-8, or an integer of thousands of digits
        raise InvalidData(f"{path} must be JSON ({error}); {PREPARE_AGAIN}") from None


def _problems(sidecar: Sidecar) -> Iterator[str]:
    """Problems of values that have the right types."""
    if sidecar.dtype not in DTYPES:
        yield f"has dtype {sidecar.dtype[:40]!r}, not one of {', '.join(DTYPES)}"
    files = [TOKENS, DOCUMENTS, *([BLOCKS] if sidecar.block_bytes is not None else [])]
    missing = [name for name in files if not isinstance(sidecar.sha256.get(name), str)]
    if missing:
        yield f"must have the sha256 of {', '.join(missing)}"
    if min(sidecar.num_tokens, sidecar.num_documents) < 1:
        yield "must count at least one token and one document"
    if not 0 <= sidecar.max_token_id < sidecar.vocab_size:
        yield (
            f"has max_token_id {sidecar.max_token_id}, which must be within "
            f"0..vocab_size-1 (vocab_size {sidecar.vocab_size})"
        )
    size = sidecar.block_bytes
    if size is not None and (type(size) is not int or size not in _BLOCK_BYTES):
        yield f"has block_bytes {size!r:.40}, which must be within 1 KiB and 64 MiB"
    spec = sidecar.tokenizer
    if spec is not None and (
        not isinstance(spec.get("name"), str)
        or not all(isinstance(spec.get(k), str | None) for k in ("path", "eos", "fingerprint"))
    ):
        yield f'has tokenizer {spec!r:.60}, which must be null or have a "name" such as "byte"'


def check_size(path: Path, count: int, item_size: int) -> None:
    """Raise InvalidData for a missing, truncated or grown file; costs one stat."""
    if not path.is_file():
        raise InvalidData(f"{path} is missing; copy it again or {PREPARE_AGAIN}")
    size, expected = path.stat().st_size, count * item_size
    if size != expected:
        state = "truncated" if size < expected else "grown"
        raise InvalidData(
            f"{path} has {size} bytes, but its sidecar records {count} items of {item_size} "
            f"({expected} bytes): it was {state}; copy it again or {PREPARE_AGAIN}"
        )


def _missing(path: Path) -> str:
    """What to do about a sidecar that is not there: it was lost, or the folder is one above token files, or another."""
    folder = path.parent
    if (folder / TOKENS).exists():
        return f"{path} is missing, and {TOKENS} cannot be read without it; {PREPARE_AGAIN}"
    below = {found.parent for found in folder.glob(f"*/{SIDECAR}")}
    below |= {found.parent.parent for found in folder.glob(f"*/train/{SIDECAR}")}
    names = ", ".join(map(str, sorted(below)[:3]))
    fix = f"name one below it, such as {names}" if below else "check the path"
    return f"{folder} must be a folder of token files, and has no {path.name}; {fix}"


def waiting_parts(output: Path) -> str:
    """Where what is to become an output waits for the end of `prepare`; "" if nothing does."""
    parts = output.with_name(f"{output.name}.parts")
    if not (output.name and parts.is_dir()):
        return ""
    return f" (its parts are in {parts}: end the `forge-data prepare` of each, and with --shard `forge-data merge`)"
