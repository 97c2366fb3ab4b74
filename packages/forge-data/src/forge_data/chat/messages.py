"""Read conversations from JSONL (also packed) and parquet files and from sets saved by `datasets`, one at a time.

Tables give each object the keys of all objects of their column, with null in most. Such nulls are removed at every depth, as a
template would show them as something in the conversation; a null that JSONL has stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from forge_data._shared.jsonl import parse
from forge_data._shared.problems import Problem, ProblemError, raise_problems
from forge_data._shared.record_keys import Keys, RecordKeys
from forge_data.errors import InvalidData, invalid_data
from forge_data.io.datasets_library import load_saved, one_sentence, require_library
from forge_data.io.files import COMPRESSIONS, files_below, open_bytes
from forge_data.io.parquet import open_parquet
from forge_data.kinds import ChatConfig
from forge_data.tokens.format import check_split, folder_of_split

__all__ = [
    "ROLES",
    "Conversation",
    "Record",
    "conversation_of",
    "find_conversations",
    "read_records",
]

_JSONL = (".jsonl", *(f".jsonl{packed}" for packed in COMPRESSIONS))
_PLAIN = (*_JSONL, ".parquet")
# `datasets` saves it next to its .arrow files, which are looked for only with it
_SAVED_SET = "dataset_info.json"
ROLES = ("assistant", "developer", "function", "ipython", "system", "tool", "user")
_BODIES = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")


class Record(NamedTuple):
    """The content of a file at one place, such as `talks.jsonl line 3`."""

    place: str
    content: Any


def find_conversations(path: Path, split: str) -> list[Path]:
    """Return the files of a split, sorted: `path` itself, or all of a folder; of `path/SPLIT` where a folder has splits.

    Raises InvalidData without such a file.
    """
    check_split(split)
    name, kinds = str(path), f"a {', '.join(_PLAIN)} file"
    if not path.exists():
        rule = f"must be {kinds} or a folder of them, but nothing is there"
        raise invalid_data("path", "not_found", name, rule, "check it")

    path = folder_of_split(path, split, "make it")

    if not path.is_dir():  # FIFOs and devices are never files of a split
        found = [path] if path.is_file() and path.name.endswith(_PLAIN) else []
    else:
        saved = (path / _SAVED_SET).is_file()
        endings = (".arrow",) if saved else _PLAIN
        named = files_below(path, lambda name: name.endswith(endings))
        found = [file for file in named if "/cache-" not in f"/{file.relative_to(path)}"]

    if not found:
        rule = f"must be {kinds}, a folder of them, or a set saved by datasets"
        raise invalid_data("path", "no_files", str(path), rule, "check it")
    return found


def read_records(files: list[Path]) -> Iterator[Record]:
    """Read all records in order, as plain JSON; blank lines are skipped. Memory: one record, or a batch of parquet.

    Raises InvalidData, naming file and line, for invalid JSON and for a damaged file; ValueError where a
    library is missing.
    """
    if files[0].suffix == ".arrow":
        yield from _saved_set(files[0].parent)
        return
    for file in files:
        yield from (_parquet if file.suffix == ".parquet" else _lines)(file)


def _lines(path: Path) -> Iterator[Record]:
    with open_bytes(path, COMPRESSIONS.get(path.suffix)) as (file, _):
        for number, line in enumerate(file, start=1):
            if line.removeprefix(b"\xef\xbb\xbf").strip():
                place = f"{path} line {number}"
                yield Record(place, parse(line, place, InvalidData, "correct the line"))


def _parquet(path: Path) -> Iterator[Record]:
    number = 0
    try:
        with open_parquet(path) as file:
            names = file.schema_arrow.names
            if len(names) > len(set(names)):
                twice = max(names, key=names.count)
                rule, fix = "must be the name of one column", "write it again with other names"
                raise invalid_data("", "duplicate", twice, rule, fix, where=path)

            for batch in file.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield Record(f"{path} row {number}", _without_nulls(row))

    except (InvalidData, ProblemError, PermissionError):
        raise
    except (OSError, ValueError) as error:
        rule, fix = f"must be a parquet file ({str(error).splitlines()[0]:.200})", "write it again"
        raise invalid_data("", "damaged", ..., rule, fix, where=path) from None


def _saved_set(folder: Path) -> Iterator[Record]:
    require_library("path", str(folder))
    from datasets import Dataset

    with one_sentence(str(folder)):
        found = load_saved(folder)
        assert isinstance(found, Dataset)
    for number, row in enumerate(found, start=1):
        yield Record(f"{folder} row {number}", _without_nulls(row))


def _without_nulls(value: Any) -> Any:
    """Objects without the keys whose value is null; elements of lists stay."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


class Conversation(NamedTuple):
    """Messages as a template gets them; `weights` has the factor of each message's loss."""

    place: str
    messages: list[dict[str, Any]]
    weights: list[float]
    tools: list[Any] | None


def conversation_of(
    record: Record, config: ChatConfig, keys: RecordKeys | None = None
) -> Conversation:
    """The conversation of a record; `keys` count its keys that are not read, without those of messages, which a template may
    read. Raises InvalidData naming its place and the message."""
    place, content = record
    key, keys = config.messages_field, keys or RecordKeys(kind=InvalidData)
    if not isinstance(content, dict):
        rule, fix = f"must be a JSON object, not {type(content).__name__}", f"give it {key!r}"
        raise invalid_data("", "type", ..., rule, fix, where=place)

    found = content.get(key)
    if not isinstance(found, list):
        rule = f"must be a list, and the record has {', '.join(map(str, content))[:200]}"
        fix = "name the key of the messages with messages_field"
        raise invalid_data(key, "missing", ..., rule, fix, where=place)
    if not found:
        rule, fix = "must have at least one message", "leave the conversation out"
        raise invalid_data(key, "empty", ..., rule, fix, where=place)

    read = {key} if config.tools_field is None else {key, config.tools_field}
    keys.check(Keys(frozenset(read)), content, place)
    messages, weights = [], []
    for number, message in enumerate(found):
        raise_problems(f"{place} message {number}", _problems(message, config), InvalidData)
        weights.append(float(1.0 if message.get("weight") is None else message["weight"]))
        # Tables (parquet, datasets) have every key in every message, with nothing in most.
        messages.append({k: v for k, v in message.items() if v is not None and k != "weight"})
    return Conversation(place, messages, weights, _tools(place, content, config.tools_field))


def _problems(message: Any, config: ChatConfig) -> Iterator[Problem]:
    """The first problem of a message."""
    fix = "correct it"
    if not isinstance(message, dict):
        rule = f"must be an object with role and content, not {type(message).__name__}"
        yield Problem("", "not_an_object", ..., rule, fix)
        return

    role, content, weight = (message.get(key) for key in ("role", "content", "weight"))
    number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    if role not in ROLES:
        yield Problem("role", "unknown", role, f"must be one of {', '.join(ROLES)}", fix)
    elif content is None and not any(message.get(body) for body in _BODIES):
        yield Problem("content", "missing", ..., "must be given", "give it a string")
    elif content is not None and not isinstance(content, str):
        rule = f"must be a string, and is a {type(content).__name__}"
        yield Problem("content", "type", ..., rule, "give its text")

    elif weight is not None and not (number and 0 <= weight < 1e6):
        yield Problem("weight", "range", weight, "must be a number from 0 to 10**6", fix)
    elif weight not in (None, 0, 1) and role != "assistant" and config.train_on != "all":
        rule = f"must be 0 or 1 for role {role!r}, which is not trained"
        yield Problem("weight", "not_trained", weight, rule, 'remove it, or set train_on = "all"')


def _tools(place: str, content: dict[str, Any], key: str | None) -> list[Any] | None:
    tools = content.get(key) if key is not None else None
    if tools is None or (isinstance(tools, list) and all(isinstance(t, dict) for t in tools)):
        return tools or None
    rule, fix = "must be a list of JSON schemas", "correct it, or remove tools_field"
    raise invalid_data(str(key), "type", tools, rule, fix, where=place)
