"""Read the texts of one column of a parquet file by row groups; needs the extra `parquet` (pyarrow)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forge_data._shared.problems import invalid
from forge_data._shared.record_keys import Keys, RecordKeys
from forge_data._shared.table_files import check_parquet
from forge_data.errors import InvalidData, invalid_data
from forge_data.io.text_column import check_column, no_text

__all__ = ["open_parquet", "read_parquet", "row_group_bytes"]

_ROWS = 256  # rows that are Python strings at one time: bounds their memory


def read_parquet(
    path: Path,
    column: str,
    report: Callable[[int], None],
    part: tuple[int, int] | None = None,
    keys: RecordKeys | None = None,
) -> Iterator[str]:
    """Read the texts of row groups part[0]..part[1]-1, or of all; rows of white space only are skipped. `keys` count the rows
    that have a value in another column, by the footer.

    Memory is the column's data in one row group. Raises InvalidData for a damaged file, for a column that
    is missing or holds no strings, and for nulls; ValueError if pyarrow is not installed.
    """
    with _opened(path, column) as file:
        metadata = file.metadata
        sizes = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
        # The sizes of row groups are of unpacked bytes, and reports are in bytes of the file.
        scale = path.stat().st_size / max(1, sum(sizes))

        first, stop = part or (0, len(sizes))
        keys = keys or RecordKeys(kind=InvalidData)
        read = {column, *(f.name for f in file.schema_arrow if str(f.type) == "null")}
        for group in range(first, stop):
            others = _other_columns(metadata.row_group(group), read)
            keys.check(Keys(frozenset((column,))), others, path)
            keys.counts.update({name: rows - 1 for name, rows in others.items()})

        row = sum(metadata.row_group(i).num_rows for i in range(first))
        done = 0
        for group in range(first, stop):
            for batch in _batches(path, file, group, column):
                for text in _strings(path, column, batch, row):
                    if text.strip():
                        yield text
                row += len(batch)
            done += sizes[group]
            report(int(done * scale))


def row_group_bytes(path: Path, column: str) -> list[int]:
    """Unpacked bytes of `column` in each row group. Costs one read of the file's footer. Raises as `read_parquet`."""
    with _opened(path, column) as file:
        metadata = file.metadata
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        names = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
        index = names.index(column)
        return [group.column(index).total_uncompressed_size for group in groups]


def require_pyarrow(path: Path) -> None:
    """Raise ValueError if the library that reads a file is missing."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        rule, fix = "needs pyarrow, which is not installed", "pip install 'forge-data[parquet]'"
        raise invalid("", "requires", ..., rule, fix, where=path) from None


@contextmanager
def _opened(path: Path, column: str) -> Iterator[Any]:
    """A ParquetFile whose `column` holds strings."""
    with open_parquet(path) as file:
        schema = file.schema_arrow

        def kind() -> str:
            from pyarrow.types import is_dictionary

            own = schema.field(column).type
            return str(own.value_type if is_dictionary(own) else own)

        check_column(path, schema.names, column, kind)
        yield file


@contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """A ParquetFile that verifies what checksums its pages have.

    Raises InvalidData for a damaged file, ValueError if pyarrow is not installed, PermissionError.
    """
    require_pyarrow(path)
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        file = ParquetFile(path, page_checksum_verification=True)
    except PermissionError:
        raise
    except (ArrowException, OSError) as error:
        raise _damaged(path, error) from None
    with file:
        check_parquet(path, file.metadata, InvalidData)
        yield file


def _other_columns(group: Any, read: set[str]) -> dict[str, int]:
    """Columns of a row group with a value, but those in `read`, and in how many rows; all rows without statistics."""
    found: dict[str, int] = {}
    for number in range(group.num_columns):
        own = group.column(number)
        name = own.path_in_schema.partition(".")[0]
        nulls = own.statistics.null_count if own.statistics is not None else 0
        if name not in read and (values := own.num_values - (nulls or 0)):
            found[name] = min(group.num_rows, max(values, found.get(name, 0)))
    return found


def _batches(path: Path, file: Any, group: int, column: str) -> Iterator[Any]:
    """Arrays of up to `_ROWS` rows of a row group."""
    from pyarrow import ArrowException

    # Processes read in parallel, so threads would only take their cores from them.
    found = file.iter_batches(_ROWS, row_groups=[group], columns=[column], use_threads=False)
    while True:
        try:
            batch = next(found, None)
        except (ArrowException, OSError) as error:
            raise _damaged(path, error, f" in row group {group}") from None
        if batch is None:
            return
        yield batch.column(0)


def _strings(path: Path, column: str, batch: Any, row: int) -> list[str]:
    """The strings of an array whose first row is row `row` of the file."""
    if batch.null_count:
        raise no_text(path, row + batch.is_null().to_pylist().index(True), column)
    try:
        strings: list[str] = batch.to_pylist()
    except UnicodeDecodeError as error:
        rule = f"must be UTF-8, but rows {row}..{row + len(batch) - 1} are not ({error.reason})"
        fix = "write it again from its source"
        raise invalid_data(column, "encoding", ..., rule, fix, where=path) from None
    return strings


def _damaged(path: Path, error: Exception, place: str = "") -> Any:
    reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
    rule = f"must be a complete parquet file, but cannot be read{place} ({reason})"
    fix = "copy or download it again"
    return invalid_data("", "damaged", ..., rule, fix, where=path)
