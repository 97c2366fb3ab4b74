"""The tokens of one chunk in a file: tokens, a row for each document, and a footer with counts and a checksum.

A chunk's file appears complete or not at all, so a restart continues after the existing files.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from forge_data._shared.atomic import new_file
from forge_data._shared.record_keys import RecordKeys
from forge_data.errors import InvalidData, invalid_data
from forge_data.prepare.plan import Chunk, FileRange, Settings
from forge_data.prepare.read import DocumentSlice, read_documents
from forge_data.tokenizer import ByteTokenizer, JsonTokenizer, document_ids
from forge_data.tokens.writer import smallest_dtype

__all__ = ["ROW", "ChunkFile", "Counts", "chunk_path", "write_chunk"]

#: A document: digest of its text (blake2b, 128 bits), to find copies, tokens with those that begin and end it, bytes
#: of its text.
ROW = np.dtype([("digest", "V16"), ("tokens", "<i8"), ("bytes", "<i8")])
_MAGIC = b"FRGUNIT1"
# bytes of the footer, magic: of fixed size, so that a file can be read from its end
_TAIL = struct.Struct("<Q8s")
_BATCH = 1 << 20  # characters that are tokenized in one call: bounds the memory of a tokenizer
_AT_ONCE = 1 << 20  # tokens, or bytes, per read: bounds the memory of a merge


class Counts(NamedTuple):
    """Bytes of files read, documents and tokens so far."""

    size: int
    documents: int
    tokens: int

    def __add__(self, other: Any) -> Counts:
        return Counts(*(a + b for a, b in zip(self, other, strict=True)))


def chunk_path(folder: Path, chunk: Chunk) -> Path:
    """The file of a chunk."""
    return folder / f"{chunk.key}.unit"


def write_chunk(
    folder: Path,
    chunk: Chunk,
    encoder: ByteTokenizer | JsonTokenizer,
    settings: Settings,
    report: Callable[[Counts], None],
) -> Counts:
    """Tokenize a chunk into its file. Memory is a MB of text, its tokens, and 32 bytes a document.

    Raises InvalidData and ValueError of `read_documents`, InvalidData for a file that is not what was planned, OSError
    for a full disk; then there is no file.
    """
    keys = RecordKeys(settings.ignore_keys, settings.strict, InvalidData)
    with new_file(chunk_path(folder, chunk)) as file:
        writer = _Writer(file, encoder)
        read = 0
        for file_range in chunk.ranges:
            try:
                reports = [0]
                for batch in _batches(file_range, settings, encoder, reports, keys):
                    writer.add(batch)
                    report(Counts(read + reports[-1], len(writer.lengths), writer.num_tokens))
            finally:
                file_range.check_unchanged()  # a change explains any other error
            read += file_range.size
        writer.finish(chunk.key, keys.counts)
    return Counts(chunk.size, len(writer.lengths), writer.num_tokens)


def _batches(
    file_range: FileRange,
    settings: Settings,
    encoder: ByteTokenizer | JsonTokenizer,
    reports: list[int],
    keys: RecordKeys,
) -> Iterator[list[DocumentSlice]]:
    """Slices of the documents of a file range, about `_BATCH` characters at a time; full documents if the tokenizer
    may merge across the end of a slice."""
    batch: list[DocumentSlice] = []
    waiting: list[str] = []
    characters = 0
    path, field = Path(file_range.path), settings.text_field

    for item in read_documents(
        path, settings.document, field, reports.append, file_range.range, keys
    ):
        characters += len(item.text)
        if not encoder.splittable:
            waiting.append(item.text)
            if not item.last:
                continue
            item, waiting = DocumentSlice("".join(waiting), last=True), []

        batch.append(item)
        if characters >= _BATCH:
            yield batch
            batch, characters = [], 0
            del reports[:-1]
    yield batch


class _Writer:
    """Appends batches of slices to a file."""

    def __init__(self, file: Any, encoder: ByteTokenizer | JsonTokenizer) -> None:
        self._file, self._encoder = file, encoder
        self._dtype = np.dtype(smallest_dtype(encoder.vocab_size)).newbyteorder("<")
        self._crc = 0
        self._digest, self._open = hashlib.blake2b(digest_size=16), [0, 0]
        self.num_tokens = 0
        self.lengths: list[int] = []
        self._bytes: list[int] = []
        self._digests = bytearray()

    def add(self, slices: Sequence[DocumentSlice]) -> None:
        arrays: list[np.ndarray] = []
        encoded: Sequence[Any] = self._encoder.encode_batch([item.text for item in slices])
        for item, ids in zip(slices, encoded, strict=True):
            content = item.text.encode("utf-8")
            self._digest.update(content)
            # a document of several slices is one of bytes, which have no begin token
            last = item.last
            arrays.append(
                document_ids(self._encoder, ids, self._dtype)
                if last
                else np.asarray(ids, self._dtype)
            )

            self._open[0] += len(arrays[-1])
            self._open[1] += len(content)
            if last:
                self.lengths.append(self._open[0])
                self._bytes.append(self._open[1])
                self._digests += self._digest.digest()
                self._digest, self._open = hashlib.blake2b(digest_size=16), [0, 0]

        if arrays:
            tokens = np.concatenate(arrays)
            self.num_tokens += len(tokens)
            self._write(tokens.tobytes())

    def finish(self, key: str, not_read: Counter[str]) -> None:
        """Write the documents' rows and the footer."""
        rows = np.empty(len(self.lengths), ROW)
        rows["digest"] = np.frombuffer(bytes(self._digests), "V16")
        rows["tokens"], rows["bytes"] = self.lengths, self._bytes
        self._write(rows.tobytes())
        footer = {
            "key": key,
            "dtype": self._dtype.name,
            "num_tokens": self.num_tokens,
            "num_documents": len(rows),
            "crc32": self._crc,
            "not_read": not_read,
        }
        content = json.dumps(footer).encode()
        self._file.write(content + _TAIL.pack(len(content), _MAGIC))

    def _write(self, content: bytes) -> None:
        self._file.write(content)
        self._crc = zlib.crc32(content, self._crc)


class ChunkFile:
    """A chunk's file, read. Raises InvalidData unless it is one of this key and has its size."""

    def __init__(self, folder: Path, chunk: Chunk) -> None:
        self.path = chunk_path(folder, chunk)
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _TAIL.size))
                length, magic = _TAIL.unpack(file.read())
                if magic != _MAGIC or length > size - _TAIL.size:
                    raise ValueError
                file.seek(size - _TAIL.size - length)
                footer = json.loads(file.read(length))

            self._dtype = np.dtype(footer["dtype"]).newbyteorder("<")
            self.num_tokens, self.num_documents = footer["num_tokens"], footer["num_documents"]
            self._crc, self.not_read = footer["crc32"], footer.get("not_read", {})
            content = self.num_tokens * self._dtype.itemsize + self.num_documents * ROW.itemsize
            if footer["key"] != chunk.key or content + length + _TAIL.size != size:
                raise ValueError
        except (KeyError, TypeError, ValueError, struct.error):
            raise self._damaged() from None

    def rows(self) -> np.ndarray:
        """A row (see `ROW`) for each document."""
        offset = self.num_tokens * self._dtype.itemsize
        return np.fromfile(self.path, ROW, self.num_documents, offset=offset)

    def tokens(self) -> Iterator[np.ndarray]:
        """All tokens, some at a time."""
        rest = self.num_tokens
        with self.path.open("rb") as file:
            while rest:
                ids = np.frombuffer(
                    file.read(min(rest, _AT_ONCE) * self._dtype.itemsize), self._dtype
                )
                rest -= len(ids)
                yield ids

    def check(self) -> None:
        """Raise InvalidData unless rows and tokens have their checksum. Costs a read of all."""
        crc, rest = 0, self.num_tokens * self._dtype.itemsize + self.num_documents * ROW.itemsize
        with self.path.open("rb") as file:
            while rest and (content := file.read(min(rest, _AT_ONCE))):
                crc, rest = zlib.crc32(content, crc), rest - len(content)
        if crc != self._crc:
            raise self._damaged()

    def _damaged(self) -> Any:
        rule = "must be the tokens of a chunk as they were written: it was damaged"
        fix = "remove it and run the same prepare again"
        return invalid_data("", "damaged", ..., rule, fix, where=self.path)
