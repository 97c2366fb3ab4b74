"""The JSON that lies beside a token file and says what its bytes mean.

tokens.bin      raw little-endian ids
documents.bin   little-endian int64: where each document starts, in tokens
tokens.json     this sidecar
tokenizer.json  a copy of the tokenizer, where it is a JSON one
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forge_data.config import DTYPES
from forge_data.errors import DataError

FORMAT = "forge-tokens"
VERSION = 1
TOKENS, DOCUMENTS, SIDECAR, TOKENIZER = (
    "tokens.bin",
    "documents.bin",
    "tokens.json",
    "tokenizer.json",
)
ITEM_SIZE = {"uint8": 1, "uint16": 2, "uint32": 4, "int32": 4, "int64": 8}
AGAIN = "prepare the text again with `forge-data prepare`"


@dataclass(frozen=True)
class Sidecar:
    """What a sidecar holds. `tokenizer` is a spec whose path is relative to the folder, or None."""

    dtype: str
    vocab_size: int
    tokenizer: dict[str, Any] | None
    num_tokens: int
    num_documents: int
    max_token_id: int
    sha256: dict[str, str]  # file name -> digest

    def write(self, folder: Path) -> None:
        """Write `tokens.json`; the caller makes the folder appear at once (rename)."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        (folder / SIDECAR).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


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
    """The sidecar of a folder, every key checked. Raises DataError naming what is wrong."""
    path = folder / SIDECAR
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"{path} is missing, and only it says what {TOKENS} holds; {AGAIN}"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} must be JSON ({error}); {AGAIN}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DataError(f'{path} must have "format": "{FORMAT}"; {AGAIN}')
    if content.get("version") != VERSION:
        raise DataError(
            f"{path} has version {content.get('version')!r}, this forge-data reads {VERSION}; "
            f"update forge-data or {AGAIN}"
        )
    wrong = [k for k, t in _TYPES.items() if k not in content or not isinstance(content[k], t)]
    if wrong:
        raise DataError(f"{path} must have a valid {', '.join(wrong)}; {AGAIN}")
    sidecar = Sidecar(**{key: content[key] for key in _TYPES})
    if sidecar.dtype not in DTYPES:
        raise DataError(
            f"{path} has dtype {sidecar.dtype!r}, not one of {', '.join(DTYPES)}; {AGAIN}"
        )
    missing = [
        name for name in (TOKENS, DOCUMENTS) if not isinstance(sidecar.sha256.get(name), str)
    ]
    if missing:
        raise DataError(f"{path} must have the sha256 of {', '.join(missing)}; {AGAIN}")
    if min(sidecar.num_tokens, sidecar.num_documents) < 1:
        raise DataError(f"{path} must count at least one token and one document; {AGAIN}")
    return sidecar


def check_size(path: Path, count: int, item_size: int) -> None:
    """Refuse a file that is missing, truncated or grown: costs one stat."""
    if not path.is_file():
        raise DataError(f"{path} is missing; copy it again or {AGAIN}")
    size, expected = path.stat().st_size, count * item_size
    if size != expected:
        state = "truncated" if size < expected else "grown"
        raise DataError(
            f"{path} has {size} bytes, but its sidecar says {count} items of {item_size} "
            f"({expected} bytes): it was {state}; copy it again or {AGAIN}"
        )


def digest_of(path: Path) -> str:
    """sha256 of a file, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
