"""JSON lines of the `datasets` library, of which one column is read: the others may have any shape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from datasets.packaged_modules.json.json import Json

from forge_data.io.text_column import check_column

__all__ = ["Json", "TextOfJson"]


class TextOfJson(Json):
    """The builder of a set of JSON files, made with `features` of the column of text alone.

    The library takes the columns and types of the first rows for those of all, raises where later rows have others, and
    makes text of numbers. Here the column is taken out before rows are compared. Raises InvalidData, naming the file, for
    one without the column, or in which it holds no text.
    """

    _file = ""

    def _generate_tables(self, *args: Any, **lists: Any) -> Iterator[Any]:
        # datasets 4 has the first name, later ones the second
        for name in ("files", "files_iterables"):
            if name in lists:
                lists[name] = [self._noted(files) for files in lists[name]]
        yield from super()._generate_tables(*args, **lists)

    def _noted(self, files: Iterable[str]) -> Iterator[str]:
        for self._file in files:
            yield self._file

    def _cast_table(self, table: Any, *args: Any, **options: Any) -> Any:
        (field,) = self.info.features
        check_column(self._file, table.column_names, field, lambda: str(table.column(field).type))
        return super()._cast_table(table.select([field]), *args, **options)
