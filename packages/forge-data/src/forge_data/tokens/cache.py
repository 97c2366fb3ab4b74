"""Cache of tokenized text: written once for all processes that share it, then read like token files.

    <cache>/<name>-<32 hex digits>    token files, as `prepare` writes them

The digits are a digest of the inputs, the tokenizer and the options.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from forge_data._shared.cache import digest_of, entry_of, once, say
from forge_data.errors import InvalidData
from forge_data.protocols import Tokenizer
from forge_data.tokenizer import ByteTokenizer, JsonTokenizer, describe_ends, document_tokenizer
from forge_data.tokens.files import TokenFiles
from forge_data.tokens.format import SIDECAR

__all__ = ["CachedTokens", "Entry", "Header", "file_states", "open_cached", "tokenizer_of"]

CACHE_VERSION = (
    1  # of entries: raise it when a file would give other documents, so that new ones are made
)
_TICK_NS = 20_000_000  # longer than the step of a local file system's time stamps
_SECONDS_BETWEEN_LINES = 10.0
T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """Where the tokens of some inputs are. `title` is what a user calls the inputs."""

    folder: Path
    title: str

    @staticmethod
    def of(cache: str | None, title: str, key: Mapping[str, Any]) -> Entry:
        """The entry of `key`, plain data that determines the tokens."""
        digest = digest_of({"cache": CACHE_VERSION, **key})
        name = re.sub(r"[^A-Za-z0-9_.-]+", "_", Path(title).name).lstrip(".")[:40]
        return Entry(entry_of("tokens", f"{name or 'tokens'}-{digest}", cache), title)

    def once(
        self, read: Callable[[], T], write: Callable[[Path, Callable[[int, int], None]], None]
    ) -> T:
        """`read()`, after `write(folder, progress)` if the tokens are not there, or damaged.

        As `cache.once`. Raises what `write` raises, ValueError for a cache that cannot be written, and InvalidData for a
        full disk.
        """

        def begin() -> None:
            say(f"tokenizing {self.title} into {self.folder}, once")
            write(self.folder, _progress())

        return once(self.folder, read, begin, what=f"tokens of {self.title}", kind=InvalidData)


class CachedTokens(TokenFiles):
    """Token files of a cache. A damaged block ends the run as in other token files, and is forgotten: the next start
    writes the entry again."""

    def read(self, start: int, stop: int) -> np.ndarray:
        """As TokenFiles.read."""
        try:
            return super().read(start, stop)
        except InvalidData as error:
            with contextlib.suppress(OSError):
                (self.path / SIDECAR).unlink(missing_ok=True)
            fix = "start again, and it is written from its text again"
            problems = [replace(p, fix=fix) for p in error.problems]
            raise InvalidData(problems, error.where) from None

    def __reduce__(self) -> tuple[Any, ...]:
        _, arguments = super().__reduce__()
        return CachedTokens, arguments


def file_states(files: Sequence[Path], root: Path) -> list[tuple[str, int, int]]:
    """(name below `root`, size, time of the last change in ns) of each file: what tells one content from another.

    Reads no content. Waits until a change after this call would have a later time stamp: at most 20 ms.
    """
    states = [
        (str(f.relative_to(root)), s.st_size, s.st_mtime_ns) for f in files for s in [f.stat()]
    ]
    newest = max(state[2] for state in states)
    age = time.time_ns() - newest
    if 0 <= age < _TICK_NS:
        time.sleep((_TICK_NS - age) / 1e9)
    return states


def open_cached(
    entry: Entry, split: str, verify: str, write: Callable[[Path, Callable[[int, int], None]], None]
) -> CachedTokens:
    """The tokens of an entry, as `Entry.once`."""
    return entry.once(lambda: CachedTokens(entry.folder, split=split, verify=verify), write)


def _progress() -> Callable[[int, int], None]:
    """A line on stderr from time to time."""
    last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            say(f"tokenized {done / max(total, 1):.0%}")

    return report


class Header:
    """Vocabulary and tokenizer of a source whose text may not be tokenized yet; `num_tokens` is None then.

    `max_token_id` is the bound that the vocabulary gives, `ends` the result of `describe_ends`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer: dict[str, Any] = tokenizer.spec()
        self.vocab_size: int | None = tokenizer.vocab_size
        self.max_token_id = tokenizer.vocab_size - 1
        self.num_tokens: int | None = None
        self.ends = describe_ends(tokenizer)
        # summary of the source; empty unless the cache has it, as nothing else is counted
        self.known = ""

    def summary(self) -> str:
        """One line about the source."""
        if self.known:
            return f"in the cache, {self.known}"
        return "its tokens are not counted before `forge-train run` tokenizes it"


def tokenizer_of(table: Any) -> ByteTokenizer | JsonTokenizer:
    """The tokenizer of a table with `tokenizer`, `eos` and `bos`; raises as `document_tokenizer`."""
    return document_tokenizer(table.tokenizer, table.eos, table.bos)
