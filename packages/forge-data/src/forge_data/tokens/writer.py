"""Write a folder of token files from a stream of ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forge_data._shared.atomic import write_file
from forge_data._shared.hashed_files import HashedFile
from forge_data.tokens.format import (
    BLOCK_BYTES,
    BLOCKS,
    DOCUMENTS,
    TOKENIZER,
    TOKENS,
    Sidecar,
    digest_of,
)


def smallest_dtype(vocab_size: int) -> str:
    """The narrowest unsigned type that holds ids under `vocab_size`."""
    return np.min_scalar_type(max(vocab_size - 1, 0)).name


class _BlockDigests:
    """Writes the sha256 of each `BLOCK_BYTES` of the content."""

    def __init__(self, path: Path) -> None:
        self._file = HashedFile(path)
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

    Memory is what one call adds. `tokenizer` is a spec; the file of a JSON tokenizer is copied into the folder.
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
        self._tokens = HashedFile(folder / TOKENS)
        self._documents = HashedFile(folder / DOCUMENTS)
        self._blocks = _BlockDigests(folder / BLOCKS)

    def add(self, documents: Sequence[np.ndarray]) -> None:
        """Append the ids of full documents, (n,) each, none of them negative; those without ids are left out."""
        lengths = np.array([len(ids) for ids in documents])
        if not lengths.any():
            return
        starts = self.num_tokens + np.cumsum(lengths) - lengths
        self.begin_documents(starts[lengths > 0])
        self.add_tokens(np.concatenate(documents))

    def begin_documents(self, starts: np.ndarray) -> None:
        """Record where documents start (num_documents,) int64, in tokens; each must have a token."""
        self._documents.write(starts.astype("<i8").tobytes())
        self.num_documents += len(starts)

    def add_tokens(self, ids: np.ndarray) -> None:
        """Append ids (n,), n > 0, that are not negative."""
        self._max = max(self._max, int(ids.max()))
        assert self._max < self._vocab_size
        content = ids.astype(np.dtype(self._dtype).newbyteorder("<"), copy=False).tobytes()
        self._tokens.write(content)
        self._blocks.feed(content)
        self.num_tokens += ids.size

    def finish(self) -> None:
        """Write everything to disk, and the sidecar last: a folder without one is not a source."""
        sha256 = {
            TOKENS: self._tokens.finish(),
            DOCUMENTS: self._documents.finish(),
            BLOCKS: self._blocks.finish(),
        }

        spec = self._tokenizer
        if spec is not None and spec["name"] == "json":
            write_file(self.folder / TOKENIZER, Path(spec["path"]).read_bytes())
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
        """Close the files, complete or not."""
        self._tokens.close()
        self._documents.close()
        self._blocks.close()
