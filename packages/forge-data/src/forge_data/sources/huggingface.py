"""`name = "huggingface"`: a set of the `datasets` library, tokenized into the cache or read while training."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_data._shared.atomic import new_folder
from forge_data._shared.paths import user_path
from forge_data.errors import InvalidData, invalid_data
from forge_data.io.datasets_library import (
    find_builder,
    is_saved,
    load_set,
    name_for_library,
    one_sentence,
    require_library,
    without_bars,
)
from forge_data.io.text_column import check_column, check_other_columns, no_text
from forge_data.text_shards import TextShards
from forge_data.tokenizer import ByteTokenizer, JsonTokenizer, begin_key, document_ids
from forge_data.tokens.cache import CachedTokens, Entry, Header, open_cached, tokenizer_of
from forge_data.tokens.format import STATISTICS, digest_of, write_json
from forge_data.tokens.writer import TokenWriter

if TYPE_CHECKING:
    from forge_data.config import SourceConfig

__all__ = ["SetPieces", "StreamedSet", "check_source", "open_header", "open_source"]

_STREAMED_ROWS = 256  # of one read of the library: bounds its memory
# Bytes at the start and the end of a file that its digest covers: the footer of parquet.
_ENDS = 1 << 16
# Bytes of all files up to which the digests cover them in full: a second of one core.
_WHOLE = 1 << 30
_NAMED_FILES = 64  # in a fingerprint; of more the digest of all, so that it stays short
_ROWS, _CHARACTERS = 1024, 1 << 22  # of a batch that is tokenized in one call: bounds its memory


class StreamedSet:
    """A set by its folder or name, and a tokenizer: a source that makes its own stream (`TextShards`).

    Opening it finds the files, reads the footers of parquet and one text, and for the digests local files: all of them
    up to 1 GiB together, else their ends. Raises InvalidData for a set that cannot be
    loaded, a column that is missing or no text, and a set without text.
    """

    def __init__(self, config: SourceConfig) -> None:
        self._table = config.huggingface
        self._tokenizer = tokenizer_of(self._table)
        self.pieces = SetPieces(config)
        self.pieces.check()
        self.tokenizer: dict[str, Any] | None = self._tokenizer.spec()
        self.vocab_size: int | None = self._tokenizer.vocab_size
        self.max_token_id = self._tokenizer.vocab_size - 1

    def stream(self, seq_len: int, seed: int) -> TextShards:
        """Rows of `seq_len` tokens in the order of `seed`."""
        table = self._table
        return TextShards(
            self.pieces,
            self._tokenizer,
            seq_len,
            seed,
            virtual_shards=table.virtual_shards,
            shuffle_window=table.shuffle_window,
        )

    def fingerprint(self) -> dict[str, str | int]:
        return self.pieces.fingerprint()


class SetPieces:
    """The row groups of a set of parquet files, or the files of any other, each read from front to back.

    The library's `reshard` makes the pieces; its shuffle, which loses and repeats rows at a resume, is not used.
    """

    def __init__(self, config: SourceConfig) -> None:
        self.path, self._field = str(config.path), config.huggingface.text_field
        with one_sentence(config.path):
            self._set, self.files = _open(config)
            self._count = int(self._set.num_shards)
        local = all(Path(file).is_file() for file in self.files)
        self._fingerprint = {
            "kind": "huggingface streaming",
            "config_name": str(self._set.info.config_name),
            "split": str(config.huggingface.split or config.split),
            "text_field": self._field,
            **(_of_local(self.files) if local else _of_names(self.files)),
        }

    def __len__(self) -> int:
        """Row groups of parquet, files of other formats."""
        return self._count

    def check(self) -> None:
        """Read the first text. Raises InvalidData if there is no text."""
        texts = itertools.chain.from_iterable(self.texts(piece, 0) for piece in range(len(self)))
        if not any(text.strip() for text in texts):
            rule = "must hold text, but every row is empty"
            raise invalid_data("path", "empty", self.path, rule, "check path and split")

    def texts(self, piece: int, start: int) -> Iterator[str]:
        """The texts of a piece from row `start` on; the rows before it are read and dropped, without being decoded.

        Raises InvalidData for what cannot be read, a missing column, and a row that is no text.
        """
        row = 0
        for table in self._tables(piece):
            if row + table.num_rows > start:
                first = max(0, start - row)
                column = self._column(piece, table).slice(first)
                for number, text in enumerate(column.to_pylist(), start=row + first):
                    if text is None:
                        raise no_text(self._where(piece), number, self._field)
                    yield text
            row += table.num_rows

    def fingerprint(self) -> dict[str, str | int]:
        """Names and sizes of the files, digests if they are local, and what is read of them."""
        return dict(self._fingerprint)

    def _tables(self, piece: int) -> Iterator[Any]:
        """The rows of a piece as tables of arrow, some at a time."""
        row = 0
        try:
            shard = self._set.shard(self._count, piece).with_format("arrow")
            for table in shard.iter(batch_size=_STREAMED_ROWS):
                yield table
                row += table.num_rows
        except (MemoryError, InvalidData):
            raise
        except Exception as error:
            # errors of the library, of arrow, of the network have no other class in common
            reason = " ".join(str(error).split()) or "no reason given"
            rule = f"must be readable after row {row}, and is not ({type(error).__name__}: {reason[:200]})"
            where, fix = self._where(piece), "copy the file again"
            raise invalid_data("", "damaged", ..., rule, fix, where=where) from error

    def _column(self, piece: int, table: Any) -> Any:
        field = self._field
        check_column(
            self._where(piece), table.column_names, field, lambda: str(table.column(field).type)
        )
        return table.column(field)

    def _where(self, piece: int) -> str:
        """The file of a piece, where that is known, and its number."""
        if len(self.files) == self._count:
            return self.files[piece]
        return f"{self.path} piece {piece} of {self._count}"


def _open(config: SourceConfig) -> tuple[Any, list[str]]:
    """An IterableDataset with a shard for each piece, and its files: paths, or addresses with their revision."""
    import datasets

    path, table = user_path(str(config.path)), config.huggingface
    if is_saved(path):
        found = load_set(config)
        check_other_columns(config, found.features, len(found))
        files = [file["filename"] for file in found.cache_files]
        if not len(found):
            rule, fix = "must hold text, but it has no rows", "check path and split"
            raise invalid_data("path", "no_rows", str(path), rule, fix)
        return found.to_iterable_dataset(num_shards=max(1, min(len(files), len(found)))), files

    if path.is_absolute() and not path.is_dir():
        rule, fix = "must be a folder of data files, or the name of a set", "check the path"
        raise invalid_data("path", "not_found", str(path), rule, fix)

    split = table.split or config.split
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # our errors contain what it logs
    with without_bars(datasets), name_for_library(path) as name:
        builder = find_builder(name, config)
        # Parquet's default batch is the first row group, which may be the full file.
        if getattr(builder.config, "batch_size", _STREAMED_ROWS) is None:
            builder.config.batch_size = _STREAMED_ROWS

        found = builder.as_streaming_dataset(split=split)
        features = builder.info.features or {}
        check_other_columns(config, features or found.features or {}, 1)
        # Parquet can leave out the other columns, so that they cost no read.
        if (
            getattr(builder.config, "columns", _STREAMED_ROWS) is None
            and table.text_field in features
        ):
            builder.config.columns = [table.text_field]
            found = builder.as_streaming_dataset(split=split)

    files = [str(file) for file in (builder.config.data_files or {}).get(split, ())]
    return found.reshard(), files


def _of_local(files: list[str]) -> dict[str, str | int]:
    """A fingerprint of files on disk: names, sizes, and digests, of the ends alone where there are more than `_WHOLE` bytes."""
    paths = [Path(file) for file in files]
    sizes = [path.stat().st_size for path in paths]
    digest = _digest if sum(sizes) <= _WHOLE else _digest_of_ends
    contents = [f"{size} bytes, {digest(path)}" for path, size in zip(paths, sizes)]
    return {"bytes": sum(sizes), **_of_names([path.name for path in paths], contents)}


def _of_names(files: list[str], contents: list[str] | None = None) -> dict[str, str | int]:
    contents = contents or [""] * len(files)
    found: dict[str, str | int] = {"files": len(files)}
    if len(files) <= _NAMED_FILES:
        return found | {
            f"file.{i}": f"{name} {c}".strip() for i, (name, c) in enumerate(zip(files, contents))
        }
    lines = "\n".join(f"{name} {c}" for name, c in zip(files, contents))
    return found | {"names_and_ends": hashlib.sha256(lines.encode()).hexdigest()[:16]}


def _digest(path: Path) -> str:
    return digest_of(path)[:16]


def _digest_of_ends(path: Path) -> str:
    with open(path, "rb") as file:
        ends = file.read(_ENDS)
        file.seek(max(0, path.stat().st_size - _ENDS))
        return hashlib.sha256(ends + file.read(_ENDS)).hexdigest()[:16]


def open_source(config: SourceConfig) -> CachedTokens | StreamedSet:
    """The set itself if it is streamed; else its tokens, tokenized now if they are not in the cache: those of `prepare`
    for the same documents.

    Memory is a batch of 1024 rows, or one row. Raises InvalidData for a set that cannot be loaded, a column that is
    missing or not text, and a set without text.
    """
    table = config.huggingface
    if table.streaming:
        require_library()
        return StreamedSet(config)

    data, others = _load(config)
    tokenizer = tokenizer_of(table)
    files = [Path(file["filename"]) for file in data.cache_files]
    key = {
        "kind": "huggingface",
        "set": data._fingerprint,  # of the rows and what was done to them; no content is read
        "files": [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files],
        "tokenizer": tokenizer.fingerprint,
        "eos": tokenizer.eos_id,
        "text_field": table.text_field,
        **begin_key(tokenizer),
    }

    def write(folder: Path, progress: Callable[[int, int], None]) -> None:
        with new_folder(folder) as unfinished:
            _write(_batches(data, config, progress), tokenizer, unfinished, str(config.path))
            write_json(unfinished / STATISTICS, {"splits": {}, "not_read": others})

    entry = Entry.of(table.cache, str(config.path), key)
    return open_cached(entry, "train", config.verify, write)


def check_source(config: SourceConfig) -> None:
    """Load the set, and tokenize nothing. Raises as `open_source`, but for what stands in rows."""
    if not config.huggingface.streaming:
        _load(config)


def open_header(config: SourceConfig) -> Header:
    """What is known without loading the set. Raises ValueError if the library is missing."""
    require_library()
    return Header(tokenizer_of(config.huggingface))


def _load(config: SourceConfig) -> tuple[Any, dict[str, int]]:
    """Load the set and check its column of text; also return the columns that are not read, with their rows."""
    data, field = load_set(config), config.huggingface.text_field

    def kind() -> str:
        return str(getattr(data.features[field], "dtype", type(data.features[field]).__name__))

    check_column(config.path, data.column_names, field, kind)
    return data, check_other_columns(config, data.features, len(data))


def _batches(
    data: Any, config: SourceConfig, progress: Callable[[int, int], None]
) -> Iterator[list[str]]:
    """Texts of rows in order, without those of white space alone."""
    field = config.huggingface.text_field
    column = data.select_columns([field]).with_format(None)
    with one_sentence(config.path):
        for first in range(0, len(data), _ROWS):
            texts = column[first : first + _ROWS][field]
            if None in texts:
                raise no_text(config.path, first + texts.index(None), field)
            yield from _bounded(text for text in texts if text.strip())
            progress(min(first + _ROWS, len(data)), len(data))


def _bounded(texts: Iterable[str]) -> Iterator[list[str]]:
    """Lists of texts of some millions of characters together, or one longer text."""
    batch: list[str] = []
    size = 0
    for text in texts:
        if batch and size + len(text) > _CHARACTERS:
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text)
    if batch:
        yield batch


def _write(
    batches: Iterable[list[str]],
    tokenizer: ByteTokenizer | JsonTokenizer,
    folder: Path,
    title: str,
) -> None:
    """Token files of the texts; a JSON tokenizer encodes a batch in the threads of its library."""
    writer = TokenWriter(folder, tokenizer.vocab_size, tokenizer.spec())
    try:
        for texts in batches:
            encoded: Iterable[Any] = tokenizer.encode_batch(texts)
            writer.add([document_ids(tokenizer, ids, np.int64) for ids in encoded])

        if writer.num_tokens == 0:
            rule = "must hold text, but every row is empty"
            raise invalid_data("path", "empty", title, rule, "check the path")
        writer.finish()
    finally:
        writer.close()
