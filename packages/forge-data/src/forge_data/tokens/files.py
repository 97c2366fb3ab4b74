"""Token files on disk, memory-mapped: a folder with a sidecar, or one raw file with a stated dtype."""

from __future__ import annotations

import contextlib
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from forge_data._shared.paths import user_path
from forge_data._shared.problems import invalid
from forge_data._shared.record_keys import unread_keys
from forge_data.config import DTYPES, SPLITS, VERIFY
from forge_data.errors import InvalidData, invalid_data
from forge_data.tokens.format import (
    BLOCKS,
    DIGEST_BYTES,
    DOCUMENTS,
    PREPARE_AGAIN,
    SIDECAR,
    TOKENIZER,
    TOKENS,
    Sidecar,
    VerifiedBlocks,
    check_digest,
    check_not_packed,
    check_offsets,
    check_range,
    check_size,
    check_split,
    folder_of_split,
    read_sidecar,
    read_statistics,
    waiting_parts,
)
from forge_data.tokens.raw import Scan, Shard, scan_shard

_BLOCK = 1 << 22  # tokens per read: bounds the memory of a check


class TokenFiles:
    """A stream of token ids in a file, read-only and memory-mapped; nothing is loaded in full.

    `path` is a folder written by `forge-data prepare` (with `train/` and `validation/` inside,
    `split` picks one), or a raw file of little-endian ids, whose `dtype` is never guessed and which
    counts as one document. A raw file has no recorded digest and largest id: the first use of
    `max_token_id` or `fingerprint()` reads it once.

    Opening a folder checks sizes and that the document offsets rise. `verify` says when contents are
    compared with the digests that `prepare` recorded: "touch", offsets now and a block of tokens when
    it is first read (folders without block digests: all tokens now); "full", all now; "off", never.
    Raises InvalidData for missing or damaged files, ValueError for a missing dtype.
    Usage: `TokenFiles("tokens/books").read(0, 100)`.
    """

    def __init__(
        self,
        path: str | Path,
        dtype: str | None = None,
        split: str = "train",
        verify: str = "touch",
    ) -> None:
        if dtype is not None and dtype not in DTYPES:
            rule = f"must be one of {', '.join(DTYPES)}"
            raise invalid("dtype", "unknown", dtype, rule, "use one of them")
        if verify not in VERIFY:
            rule = f"must be one of {', '.join(VERIFY)}"
            raise invalid("verify", "unknown", verify, rule, "use touch")
        self._arguments = (str(path), dtype, split)
        self._verify = verify
        self._blocks: VerifiedBlocks | None = None
        self.path = resolve_split(user_path(path), split)
        self._sidecar = None if self.path.is_file() else read_sidecar(self.path)
        if self._sidecar is None:
            self._open_raw(dtype)
        else:
            self._open_folder(self._sidecar, dtype)

    def _open_raw(self, dtype: str | None) -> None:
        if dtype is None:
            rule = "must be given, as the file has no sidecar, and two types can fit the same bytes"
            raise invalid(
                "dtype", "missing", dtype, rule, 'use "uint16", for example', where=self.path
            )
        if self._verify == "full":
            rule = "needs the digests of a sidecar, which the file does not have"
            fix = "remove verify, or prepare the text with `forge-data prepare`"
            raise invalid("verify", "requires", "full", rule, fix, where=self.path)

        check_not_packed(self.path)
        self._shard = Shard.of_file(self.path, dtype)
        self.vocab_size: int | None = None
        self.tokenizer: dict[str, Any] | None = None
        self._tokens = _map(self.path, dtype)
        self.documents: np.ndarray = np.zeros(1, np.int64)

    def _open_folder(self, sidecar: Sidecar, dtype: str | None) -> None:
        if dtype is not None and dtype != sidecar.dtype:
            rule = f"must agree with the sidecar of {self.path}, which records {sidecar.dtype!r}"
            raise invalid("dtype", "mismatch", dtype, rule, "remove dtype")
        check_size(self.path / TOKENS, sidecar.num_tokens, np.dtype(sidecar.dtype).itemsize)
        check_size(self.path / DOCUMENTS, sidecar.num_documents, 8)
        self.vocab_size = sidecar.vocab_size
        self.tokenizer = _absolute(sidecar.tokenizer, self.path)
        self._tokens = _map(self.path / TOKENS, sidecar.dtype)
        self.documents = _map(self.path / DOCUMENTS, "int64")
        check_offsets(self.path / DOCUMENTS, self.documents, sidecar.num_tokens)
        if self._verify != "off":
            self._check_contents(sidecar)

    def _check_contents(self, sidecar: Sidecar) -> None:
        """Compare the digests that `verify` requires before the first read."""
        tokens, digests = self.path / TOKENS, self.path / BLOCKS
        check_digest(self.path / DOCUMENTS, sidecar.sha256[DOCUMENTS])
        if sidecar.block_bytes is not None:
            size = sidecar.num_tokens * np.dtype(sidecar.dtype).itemsize
            check_size(digests, -(-size // sidecar.block_bytes), DIGEST_BYTES)
            check_digest(digests, sidecar.sha256[BLOCKS])
            self._blocks = VerifiedBlocks(tokens, digests, sidecar.block_bytes)
            if self._verify == "touch":
                return

        try:
            check_digest(tokens, sidecar.sha256[TOKENS])
        except InvalidData:
            if self._blocks is not None:
                # raises InvalidData with the damaged block, which the digest of the file does not tell
                self._blocks.touch_all()
            raise
        self._blocks = None

    @cached_property
    def _scan(self) -> Scan:
        """Digest and largest id of a raw file, as they were at the first use."""
        return scan_shard(self._shard)

    @property
    def num_tokens(self) -> int:
        """Tokens of the chosen split."""
        return len(self._tokens)

    @property
    def num_documents(self) -> int:
        """Documents of the chosen split."""
        return len(self.documents)

    def summary(self) -> str:
        """One line about the source, with keys that `prepare` did not read. Reads `statistics.json`."""
        statistics = None
        if self._sidecar is not None:
            with contextlib.suppress(InvalidData, OSError):  # nothing depends on it
                statistics = read_statistics(Path(self._arguments[0]))
        line = f"{self.num_documents:,} documents, {self.num_tokens:,} tokens"
        return line + unread_keys((statistics or {}).get("not_read", {}))

    @property
    def max_token_id(self) -> int:
        """The largest id: from the sidecar, or by reading a raw file once."""
        return self._sidecar.max_token_id if self._sidecar else self._scan.high

    def read(self, start: int, stop: int) -> np.ndarray:
        """Ids of tokens start..stop-1, a read-only view of the file.

        Raises ValueError outside the file, and InvalidData for a damaged block and for an id over the
        recorded largest: in an embedding it would be an index error on a device, without a file name.
        """
        check_range(start, stop, self.num_tokens)
        ids = self._tokens[start:stop]
        if self._blocks is not None:
            self._blocks.touch(start * ids.itemsize, stop * ids.itemsize)
        if stop == start:
            return ids
        # a raw file is looked through once before; it may have changed since
        highest, high = self.max_token_id, int(np.maximum.reduce(ids))
        low = int(ids.min()) if ids.dtype.kind == "i" else 0
        if high > highest or low < 0:
            path = self.path / TOKENS if self._sidecar else self.path
            state = "below 0" if low < 0 else f"over the recorded largest {highest}"
            rule = f"between {start} and {stop} is {state}: it was damaged"
            fix = "run `forge-data verify` on it and copy it again"
            raise invalid_data("id", "range", min(low, 0) or high, rule, fix, where=path)
        return ids

    def fingerprint(self) -> dict[str, str | int]:
        """Digests of the files, from the sidecar if there is one. The path is not in it: data may move."""
        if self._sidecar is None:
            return {"kind": "tokens", "num_tokens": self.num_tokens, "tokens": self._scan.digest}
        spec = self._sidecar.tokenizer or {}
        return {
            "kind": "tokens",
            "num_tokens": self.num_tokens,
            "tokens": self._sidecar.sha256[TOKENS],
            "documents": self._sidecar.sha256[DOCUMENTS],
            "tokenizer": str(spec.get("fingerprint", "none")),
        }

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker maps the files itself: no token is copied. Files that were compared as a whole here are
        # not compared again there.
        whole = self._verify != "off" and self._blocks is None and self._sidecar is not None
        return TokenFiles, (*self._arguments, "off" if whole else self._verify)


def verify(path: str | Path) -> int:
    """Read a prepared folder (with all its splits) and check every digest and count.

    Returns the number of tokens checked, raises InvalidData at the first difference. Costs one read of
    everything. Usage: `verify("tokens/books")`.
    """
    path = user_path(path)
    splits = [path / split for split in SPLITS if (path / split).is_dir()]
    return sum(_verify_folder(folder) for folder in splits or [path])


def _verify_folder(folder: Path) -> int:
    sidecar = read_sidecar(folder)
    # Blocks first: their digests locate the damage, the digest of the whole file does not.
    source = TokenFiles(folder, verify="off" if sidecar.block_bytes is None else "touch")
    highest = 0
    for start in range(0, source.num_tokens, _BLOCK):
        highest = max(
            highest, int(source.read(start, min(start + _BLOCK, source.num_tokens)).max())
        )

    for name, recorded in sidecar.sha256.items():
        if Path(name).name != name:
            rule, where = "must not leave the folder", folder / SIDECAR
            raise invalid_data("sha256", "outside", name, rule, PREPARE_AGAIN, where=where)
        if not (folder / name).is_file():
            fix, where = f"copy it again or {PREPARE_AGAIN}", folder / name
            raise invalid_data("", "missing", ..., "is missing", fix, where=where)
        check_digest(folder / name, recorded)

    if highest != sidecar.max_token_id:
        rule, where = f"must be that of {TOKENS}, {highest}", folder / SIDECAR
        found = sidecar.max_token_id
        raise invalid_data("max_token_id", "mismatch", found, rule, PREPARE_AGAIN, where=where)
    return source.num_tokens


def resolve_split(path: Path, split: str) -> Path:
    """What to open for `split` of `path`: a folder `path/SPLIT` if there are splits, else, for train, `path` itself."""
    check_split(split)
    name = str(path)
    if not path.exists():
        rule = "must be a folder of token files or a raw file, but nothing is there"
        fix = f"check it, or write it with `forge-data prepare`{waiting_parts(path)}"
        raise invalid_data("path", "not_found", name, rule, fix)
    if not (path.is_file() or path.is_dir()):
        rule = "must be a folder of token files or a regular file"
        raise invalid_data("path", "not_a_file", name, rule, "check it")

    path = folder_of_split(path, split, f"{PREPARE_AGAIN} --validation_every 20")
    if path.name == TOKENS and (path.parent / SIDECAR).is_file():
        # the file inside a prepared folder, whose sidecar has its type and digests
        return path.parent
    return path


def _map(path: Path, dtype: str) -> np.ndarray:
    """A read-only memory map: processes of a host share its pages, and nothing is loaded before use."""
    # A plain array over the map: each slice of a memmap costs microseconds more.
    return np.asarray(np.memmap(path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r"))


def _absolute(spec: dict[str, Any] | None, folder: Path) -> dict[str, Any] | None:
    """A spec with the absolute path of the tokenizer file."""
    if spec is None or spec.get("name") != "json":
        return spec
    return {**spec, "path": str((folder / TOKENIZER).resolve())}
