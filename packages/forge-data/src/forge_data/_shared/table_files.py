# Copied from scripts/shared/table_files.py; edit that file, then run scripts/copy_shared.py.
"""Damage of parquet files and saved sets that their libraries read as fewer rows.

check_parquet(path, ParquetFile(path).metadata, InvalidData)   # two files in one, of which the library reads half
check_saved_set(folder, InvalidData)                           # Arrow files that end early, or that are FIFOs

Both need pyarrow, and read no rows.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

from .paths import open_regular
from .problems import WithProblems, invalid

_END = b"\xff\xff\xff\xff\0\0\0\0"  # of a stream, arrow.apache.org/docs/format/Columnar.html


def check_parquet(path: Path, metadata: Any, kind: type[WithProblems]) -> None:
    """Raise `kind` for files written one after another: the footer of the last one is read with offsets into the first."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    columns = [group.column(i) for group in groups for i in range(group.num_columns)]
    stop = 4
    for column in columns:
        start = column.data_page_offset
        if column.dictionary_page_offset is not None:
            start = min(start, column.dictionary_page_offset)
        stop = max(stop, start + column.total_compressed_size)

    # Indexes of pages stand between the data and the footer, so a gap there is no damage by itself.
    gap = path.stat().st_size - 8 - metadata.serialized_size - stop
    if gap < 12:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        seam = content.find(b"PAR1PAR1", 0, gap + 8)
    if seam >= 0:
        rule, fix = f"is two parquet files, the second from byte {seam + 4} on", "divide it"
        raise invalid("", "damaged", ..., rule, fix, where=path, kind=kind)


def check_saved_set(folder: Path, kind: type[WithProblems]) -> None:
    """Raise `kind` for an Arrow file below a folder of `save_to_disk` that is not one complete stream, or no regular file.

    The library takes the end of a file between two batches for the end of its rows, does not read past the end of a
    stream, and waits for a FIFO. Raises OSError, and ValueError of pyarrow for other damage. Costs a look at the head of
    each batch.
    """
    import pyarrow

    for path in sorted(folder.rglob("*.arrow")):
        if path.name.startswith("cache-"):
            continue
        descriptor, size = open_regular(path, kind)
        with open(descriptor, "rb") as file:
            file.seek(max(0, size - len(_END)))
            complete = file.read() == _END

        if complete:
            with pyarrow.memory_map(str(path)) as source:
                messages = pyarrow.ipc.MessageReader.open_stream(source)
                while _has_next(messages):
                    pass
                complete = source.tell() == size
        if not complete:
            rule = "must end with the end of its Arrow stream: it was truncated or has grown"
            raise invalid("", "truncated", ..., rule, "save it again", where=path, kind=kind)


def _has_next(messages: Any) -> bool:
    try:
        messages.read_next_message()
    except StopIteration:
        return False
    return True
