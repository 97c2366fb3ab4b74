"""Checks of the columns of a table: the one with the text, and the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forge_data._shared.record_keys import Keys, RecordKeys
from forge_data.errors import InvalidData, invalid_data

if TYPE_CHECKING:
    from forge_data.config import SourceConfig

__all__ = ["check_column", "check_other_columns", "no_text"]


def check_column(
    where: Any, names: Sequence[str], field: str, kind: Callable[[], str] | None = None
) -> None:
    """Raise InvalidData unless `field` names one column, of a `kind` that holds strings."""
    fix, key = "name the one with the text in text_field (--text_field)", "text_field"
    if (count := [*names].count(field)) != 1:
        rule = f"must be one of its columns, {', '.join(names)[:200] or 'none'}"
        rule += f", and is {count} of them" * bool(count)
        code = "duplicate" if count else "missing"
        raise invalid_data(key, code, field, rule, fix, where=where)
    if kind is not None and kind() not in ("string", "large_string", "string_view", "null"):
        rule = f"must be a column of text, and holds {kind()[:60]}"
        raise invalid_data(key, "type", field, rule, fix, where=where)


def check_other_columns(
    config: SourceConfig, features: Mapping[str, Any], rows: int
) -> dict[str, int]:
    """Columns of a Hugging Face set that are not read, with their rows; InvalidData for one whose content would be lost."""
    table = config.huggingface
    keys = RecordKeys(table.ignore_keys, table.strict, InvalidData)
    filled = {name: rows for name, kind in features.items() if getattr(kind, "dtype", "") != "null"}
    keys.check(Keys(frozenset((table.text_field,))), filled, config.path)
    return dict.fromkeys(keys.counts, rows)


def no_text(where: Any, row: int, field: str) -> Any:
    """The error of a row without a string."""
    rule, fix, where = "must be a string", "leave the row out", f"{where} row {row}"
    return invalid_data(field, "null", None, rule, fix, where=where)
