"""Ids to a folder of token files, streaming; and the folder to its place, at once."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from forge_data.config import SPLITS
from forge_data.errors import DataError
from forge_data.sources.blocks import BLOCK_BYTES, digest_of
from forge_data.sources.sidecar import (
    BLOCKS,
    DOCUMENTS,
    SIDECAR,
    TOKENIZER,
    TOKENS,
    Sidecar,
)


def smallest_dtype(vocab_size: int) -> str:
    """The narrowest unsigned type that holds ids under `vocab_size`."""
    return next(
        t for t, bits in (("uint8", 8), ("uint16", 16), ("uint32", 32)) if vocab_size <= 1 << bits
    )


class _HashedFile:
    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("xb")
        self._digest = hashlib.sha256()

    def write(self, content: bytes) -> None:
        self._file.write(content)
        self._digest.update(content)

    def finish(self) -> str:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._digest.hexdigest()

    def close(self) -> None:
        self._file.close()


class _BlockDigests:
    """Writes the sha256 of each `BLOCK_BYTES` of what it is fed."""

    def __init__(self, path: Path) -> None:
        self._file = _HashedFile(path)
        self._digest, self._room = hashlib.sha256(), BLOCK_BYTES

    def feed(self, content: bytes) -> None:
        view = memoryview(content)
        while view:
            part, view = view[: self._room], view[self._room :]
            self._digest.update(part)
            self._room -= len(part)
            if self._room == 0:
                self._end_block()

    def _end_block(self) -> None:
        self._file.write(self._digest.digest())
        self._digest, self._room = hashlib.sha256(), BLOCK_BYTES

    def finish(self) -> str:
        if self._room < BLOCK_BYTES:
            self._end_block()
        return self._file.finish()

    def close(self) -> None:
        self._file.close()


class TokenWriter:
    """Writes tokens, block digests, document offsets and, at the end, the sidecar into an empty folder.

    Memory is one piece. `tokenizer` is a spec; a JSON tokenizer's file is copied beside.
    """

    def __init__(self, folder: Path, vocab_size: int, tokenizer: dict[str, Any] | None) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.num_tokens = 0
        self.num_documents = 0
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._dtype = smallest_dtype(vocab_size)
        self._max = 0
        self._open_document = False
        self._tokens = _HashedFile(folder / TOKENS)
        self._documents = _HashedFile(folder / DOCUMENTS)
        self._blocks = _BlockDigests(folder / BLOCKS)

    def add(self, ids: Sequence[int], last: bool) -> None:
        """Append ids to the current document; `last` ends it."""
        array = np.asarray(ids, dtype=np.int64)
        if array.size:
            if not self._open_document:
                self._documents.write(np.array([self.num_tokens], dtype="<i8").tobytes())
                self.num_documents += 1
            self._open_document = True
            assert array.min() >= 0
            self._max = max(self._max, int(array.max()))
            assert self._max < self._vocab_size
            content = array.astype(np.dtype(self._dtype).newbyteorder("<")).tobytes()
            self._tokens.write(content)
            self._blocks.feed(content)
            self.num_tokens += array.size
        self._open_document = self._open_document and not last

    def finish(self) -> None:
        """Flush to disk, then write the sidecar, without which the folder is not a source."""
        sha256 = {
            TOKENS: self._tokens.finish(),
            DOCUMENTS: self._documents.finish(),
            BLOCKS: self._blocks.finish(),
        }
        spec = self._tokenizer
        if spec is not None and spec["name"] == "json":
            shutil.copyfile(spec["path"], self.folder / TOKENIZER)
            sha256[TOKENIZER] = digest_of(self.folder / TOKENIZER)
            spec = {**spec, "path": TOKENIZER}
        Sidecar(
            dtype=self._dtype,
            vocab_size=self._vocab_size,
            tokenizer=spec,
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            max_token_id=self._max,
            sha256=sha256,
            block_bytes=BLOCK_BYTES,
        ).write(self.folder)

    def close(self) -> None:
        """Release the files, finished or not."""
        self._tokens.close()
        self._documents.close()
        self._blocks.close()


def check_output(output: Path, inputs: Sequence[Path], overwrite: bool) -> None:
    """Refuse to replace what must not be: anything without `overwrite`, and never but token files."""
    if not (output.exists() or output.is_symlink()):
        return
    if not overwrite:
        raise ValueError(
            f"output {output} must not exist yet; choose another, or replace it with overwrite=True "
            "(--overwrite)"
        )
    places = [output, *(output / split for split in SPLITS)]
    if output.is_symlink() or not any((place / SIDECAR).is_file() for place in places):
        raise ValueError(
            f"output {output} must be a folder of token files to be overwritten; choose another"
        )
    inside = [i for i in inputs if i.resolve().is_relative_to(output.resolve())]
    if inside:
        raise ValueError(
            f"input {inside[0]} must not lie in the output {output}, which would be replaced; "
            "choose another output"
        )


@contextmanager
def replacing(output: Path) -> Iterator[Path]:
    """A new folder beside `output` that takes its name when the block ends well, else disappears.

    An `output` that exists is only moved away when the new one is complete, and comes back when the
    last rename fails. Raises ValueError where no folder can be made.
    """
    output = output.absolute()
    temporary = output.with_name(f".{output.name}.tmp-{os.getpid()}")
    old = output.with_name(f".{output.name}.old-{os.getpid()}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
    except OSError as error:
        raise ValueError(
            f"output {output} must be in a folder that can be written ({error.strerror}); "
            "choose another"
        ) from None
    try:
        yield temporary
        _sync(temporary)
        if output.exists():
            output.rename(old)
            try:
                temporary.rename(output)
            except BaseException:
                old.rename(output)
                raise
            shutil.rmtree(old)
        else:
            temporary.rename(output)
        _sync(output.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _sync(folder: Path) -> None:
    """fsync a folder, so that its names survive a power cut."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def refuse_empty(writers: dict[str, TokenWriter], num_documents: int) -> None:
    """DataError for a split that got no document."""
    for split, writer in writers.items():
        if writer.num_tokens == 0 and num_documents == 0:
            raise DataError(
                "the input must hold text, but every document is empty; check the paths"
            )
        if writer.num_tokens == 0:
            raise DataError(
                f"split {split} would be empty with {num_documents} documents; use a smaller "
                "validation_every, or document line or blank_line for more documents"
            )
