"""`name = "text"`: text files, tokenized into the cache as `prepare` would."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_data._shared.cache import say
from forge_data._shared.paths import user_path
from forge_data.errors import InvalidData, invalid_data
from forge_data.prepare.pipeline import prepare
from forge_data.prepare.plan import changed_meanwhile
from forge_data.prepare.read import find_inputs, not_read
from forge_data.tokenizer import begin_key
from forge_data.tokens.cache import (
    CachedTokens,
    Entry,
    Header,
    file_states,
    open_cached,
    tokenizer_of,
)
from forge_data.tokens.format import folder_of_split

if TYPE_CHECKING:
    from forge_data.config import SourceConfig

__all__ = ["open_header", "open_source"]


def open_source(config: SourceConfig) -> CachedTokens:
    """The tokens of text files, tokenized now if they are not in the cache.

    Raises InvalidData for files that are no text, and for some that change while they are read.
    """
    root, files, entry = _look(config)
    table, before = config.text, file_states(files, root)

    def write(folder: Path, progress: Callable[[int, int], None]) -> None:
        if user_path(config.path or "").is_dir() and (line := not_read(root)):
            say(line)

        prepare(
            files,
            folder,
            **{key: value for key, value in vars(table).items() if key != "cache"},
            workers=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
            progress=lambda now: progress(now.done, now.total) if now.stage == "tokenize" else None,
        )

        changed = [old[0] for old, new in zip(before, file_states(files, root)) if old != new]
        if changed:
            raise changed_meanwhile(root / changed[0])

    split = config.split if table.validation_every else "train"
    return open_cached(entry, split, config.verify, write)


def open_header(config: SourceConfig) -> Header:
    """What is known without reading the text. The number of tokens is, if they are in the cache."""
    _, _, entry = _look(config)
    header = Header(tokenizer_of(config.text))
    split = config.split if config.text.validation_every else "train"
    if entry.folder.is_dir():
        try:
            tokens = CachedTokens(entry.folder, split=split, verify="off")
        except InvalidData:
            return header  # a damaged entry: it will be written again
        header.num_tokens, header.known = tokens.num_tokens, tokens.summary()
    return header


def _look(config: SourceConfig) -> tuple[Path, list[Path], Entry]:
    """The folder of the names in the key, the files, and where their tokens are."""
    table = config.text
    path = _folder_of_split(user_path(config.path or ""), config.split, table.validation_every)
    files = find_inputs([path])
    root = path if path.is_dir() else path.parent

    tokenizer = tokenizer_of(table)
    key: dict[str, Any] = {
        "kind": "text",
        "files": file_states(files, root),
        "tokenizer": tokenizer.fingerprint,
        "eos": tokenizer.eos_id,
        "document": table.document,
        "text_field": table.text_field,
        "validation_every": table.validation_every,
        **begin_key(tokenizer),
    }
    if table.ignore_keys or table.strict:  # without them an entry may be of an older version
        key["keys"] = [sorted(table.ignore_keys), table.strict]
    return root, files, Entry.of(table.cache, str(config.path), key)


def _folder_of_split(path: Path, split: str, validation_every: int) -> Path:
    """The text of a split: all of it, if every N-th document is held out, or the folder of that name."""
    name, fix = str(path), "check the path"
    if not os.path.lexists(path):
        rule = "must be a text file or a folder of some"
        raise invalid_data("path", "not_found", name, rule, fix)

    if validation_every and (path / "validation").is_dir():
        rule = (
            f"must not be given for {path}, whose folder validation/ would be mixed with the rest"
        )
        key, fix = "text.validation_every", f"remove the key, or name {path / 'train'}"
        raise invalid_data(key, "mixed", validation_every, rule, fix)
    if validation_every:
        return path

    return folder_of_split(path, split, "make it, or set text.validation_every = 20")
