"""`name = "huggingface"`: a set of the `datasets` library, tokenized into the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_data._shared.atomic import new_folder
from forge_data._shared.problems import invalid
from forge_data.errors import InvalidData
from forge_data.prepare.output import write_json
from forge_data.prepare.statistics import STATISTICS
from forge_data.prepare.token_writer import TokenWriter
from forge_data.sources.datasets_library import (
    load_set,
    one_sentence,
    require_library,
)
from forge_data.sources.header import Header, tokenizer_of
from forge_data.sources.huggingface_stream import StreamedSet
from forge_data.sources.text_column import check_column, check_other_columns, no_text
from forge_data.sources.token_cache import CachedTokens, Entry, open_cached
from forge_data.tokenizer import ByteTokenizer, JsonTokenizer, begin_key, document_ids

if TYPE_CHECKING:
    from forge_data.config import SourceConfig

__all__ = ["check_source", "open_header", "open_source"]

_ROWS, _CHARACTERS = 1024, 1 << 22  # of a batch that is tokenized in one call


def open_source(config: SourceConfig) -> CachedTokens | StreamedSet:
    """The set itself if it is streamed; else its tokens, tokenized now if they are not in the cache: those of `prepare`
    for the same documents.

    Memory is a batch of 1024 rows, or one row. Raises InvalidData for a set that cannot be loaded, a column that is
    missing or no text, and a set without text.
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
    """The set, whose column of text is there and holds strings, and its columns that are not read, by their rows."""
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
            documents = [document_ids(tokenizer, ids, np.int64) for ids in encoded]
            lengths = np.array([len(ids) for ids in documents])
            starts = writer.num_tokens + np.cumsum(lengths) - lengths
            if lengths.any():
                writer.begin_documents(starts[lengths > 0])
                writer.add_tokens(np.concatenate(documents))
        if writer.num_tokens == 0:
            rule = "must hold text, but every row is empty"
            raise invalid("path", "empty", title, rule, "check the path", kind=InvalidData)
        writer.finish()
    finally:
        writer.close()
