"""Read the documents of text files in several formats; memory is bounded by a slice, not by a file."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import Any, Literal, NamedTuple

from forge_data._shared.jsonl import parse
from forge_data._shared.problems import Problem
from forge_data._shared.record_keys import Keys, RecordKeys
from forge_data.errors import InvalidData, invalid_data
from forge_data.io.files import COMPRESSIONS, files_below, open_bytes
from forge_data.io.parquet import read_parquet
from forge_data.io.text_column import check_column
from forge_data.kinds import DOCUMENTS

__all__ = [
    "SLICE",
    "DocumentSlice",
    "Format",
    "Kind",
    "find_inputs",
    "format_of",
    "not_read",
    "read_documents",
    "read_text",
    "tar_error",
]

_RECORDS = (".jsonl", ".ndjson", ".json")
_ENDINGS = (".txt", ".md", ".jsonl", ".ndjson", ".csv")
#: Archives: their files would become one document together with their headers.
_TAR = (".tar", ".tgz", ".tbz2", ".txz", ".tzst", *(f".tar{packed}" for packed in COMPRESSIONS))
#: Endings of names that are looked for in folders. What is .json there often describes the others; packed, it is lines.
_PACKED_ENDINGS = tuple(text + packed for text in (*_ENDINGS, ".json") for packed in COMPRESSIONS)
SUFFIXES = (*_ENDINGS, *_PACKED_ENDINGS, ".parquet")
#: First bytes of supported formats -> name and ending: under another ending they would be read as something else.
_READ = {
    b"PAR1": ("parquet", ".parquet"),
    b"\x1f\x8b": ("gzip", ".gz"),
    b"(\xb5/\xfd": ("zstd", ".zst"),
    b"BZh": ("bzip2", ".bz2"),
    b"\xfd7zXZ": ("xz", ".xz"),
}
#: First bytes of formats that are often tried, and the way to make text of them, which the error tells.
_NOT_READ = {
    b"ARROW1": ("Arrow", "write its text column as parquet or .jsonl"),
    b"PK\x03\x04": ("zip", "unpack it with unzip"),
    b"%PDF": ("PDF", "extract its text, for example with pdftotext"),
}
SLICE = 1 << 20  # characters of a slice when the whole file is one document: bounds memory
_LONGEST_FIELD = (
    2**31 - 1
)  # in characters; the default of csv, 131,072, would reject long documents
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # json makes one character of a pair
_HEAD = 4096  # bytes that identify other formats: a tar has its mark at byte 257
_REPORT = 1 << 16  # characters between two reports, so that short documents do not each cost one


#: What the ending of a name stands for. Another one also needs an ending in `format_of` and `_ENDINGS`, a reader in
#: `read_documents` or `read_text`, and its boundaries in `plan._file_ranges`.
Kind = Literal["text", "records", "csv", "parquet"]


class Format(NamedTuple):
    """The format that a file name stands for: `compression` is one of COMPRESSIONS or None."""

    kind: Kind
    compression: str | None


def format_of(path: Path) -> Format:
    """The format of a file by the ending of its name, in any case. Unknown endings are text."""
    compression = COMPRESSIONS.get(path.suffix.lower())
    suffix = (Path(path.stem).suffix if compression else path.suffix).lower()
    if suffix in _RECORDS:
        return Format("records", compression)
    kinds: dict[str, Kind] = {".parquet": "parquet", ".csv": "csv"}
    return Format(kinds.get(suffix, "text"), compression)


def find_inputs(inputs: Sequence[Path]) -> list[Path]:
    """The given files, and of each folder its files of known endings (`SUFFIXES`) as `files_below` finds them.

    Raises InvalidData for a path that does not exist, for a folder without such a file, and for one with a tar or with
    what `files_below` rejects; OSError for one that cannot be read.
    """
    files: list[Path] = []
    for path in inputs:
        if path.is_file():
            files.append(path)
            continue
        if not path.is_dir():
            name, rule = str(path), "must be a file or a folder"
            raise invalid_data("inputs", "not_found", name, rule, "check the path")

        found = files_below(path, lambda name: name.lower().endswith((*SUFFIXES, *_TAR)))
        for file in found:
            if file.name.lower().endswith(_TAR):
                raise tar_error(file)
        if not found:
            rule = f"must hold {', '.join(_ENDINGS)} files (also with {', '.join(COMPRESSIONS)}) or .parquet files"
            fix, name = "name other files one by one", str(path)
            raise invalid_data("inputs", "no_files", name, rule, fix)
        files.extend(found)
    return files


def not_read(folder: Path) -> str:
    """A sentence about the files of a folder that `find_inputs` leaves out; "" if there are none. Hidden ones are not
    counted."""
    names = [f.name for f in files_below(folder, lambda name: not name.lower().endswith(SUFFIXES))]
    if not names:
        return ""
    kinds = Counter(Path(name).suffix.lower() or "without an ending" for name in names)
    counts = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common(8))
    counts += f" and {len(kinds) - 8} other endings" if len(kinds) > 8 else ""
    return (
        f"{folder}: {len(names)} files were not read, as their names do not say that they are text: {counts}; name one "
        "to read it all the same"
    )


def read_documents(
    path: Path,
    document: str,
    text_field: str,
    report: Callable[[int], None],
    part: tuple[int, int] | None = None,
    keys: RecordKeys | None = None,
) -> Iterator[DocumentSlice]:
    """Read the documents of one file as slices. `report` is called with the number of its bytes read so far; `keys` count what is not read
    of records and rows.

    `document` is "file", "line" or "blank_line" (paragraphs) in text; a .jsonl, .ndjson or .json file has one
    document a line, a .csv and a .parquet file one a row, in `text_field`. Names may end in those of COMPRESSIONS. Line ends in a
    document do not change. Documents of white space alone are skipped. `part` is a range of the file at
    whose ends documents end: bytes of text, row groups of parquet; packed files and .csv have no parts.

    Raises InvalidData for bytes that are not UTF-8, for text of UTF-16, for damaged files, for formats that are not read and
    for lines and rows without a text; ValueError if a format's library is not installed.
    """
    kind, compression = format_of(path)
    _check_format(path, kind, compression)
    if kind == "parquet":
        texts = read_parquet(path, text_field, report, part, keys)
        return (DocumentSlice(text, last=True) for text in texts)
    layout = document if kind == "text" else kind
    return read_text(path, layout, text_field, compression, report, part, keys)


def _check_format(path: Path, kind: str, compression: str | None) -> None:
    """Raise InvalidData if the first bytes of a file are those of another format than its name's."""
    if kind == "parquet" and compression:
        rule = "is a packed parquet file, and row groups are read by their position"
        raise invalid_data("", "packed", ..., rule, "unpack it first", where=path)

    with path.open("rb") as raw:
        first = raw.read(8)
    if path.name.lower().endswith(_TAR):
        raise tar_error(path)
    for magic, (name, ending) in _READ.items():
        if first.startswith(magic) and name not in (kind, compression):
            rule = f"is a {name} file by its first bytes, and not by its name"
            fix = f"rename it to end in {ending}"
            raise invalid_data("", "ending", ..., rule, fix, where=path)

    for magic, (name, fix) in _NOT_READ.items():
        if first.startswith(magic):
            rule = f"is a {name} file, which forge-data does not read"
            fix = f"{fix} and prepare that"
            raise invalid_data("", "unsupported", ..., rule, fix, where=path)


class DocumentSlice(NamedTuple):
    """Consecutive text of one document; `last` for its final slice."""

    text: str
    last: bool


def read_text(
    path: Path,
    layout: str,
    text_field: str,
    compression: str | None,
    report: Callable[[int], None],
    part: tuple[int, int] | None = None,
    keys: RecordKeys | None = None,
) -> Iterator[DocumentSlice]:
    """Read the documents of a text file. `layout` is one of DOCUMENTS, or "records" of JSON lines and "csv" for the texts
    in `text_field`, whose other keys `keys` count.

    `part` is a range of bytes that starts and ends where documents do. Raises InvalidData for bytes that
    are not UTF-8, text of UTF-16, a tar, lines that are not JSON objects with a text and rows that are not those of the header.
    """
    start = part[0] if part else 0
    with open_bytes(path, compression, part) as (raw, consumed):
        if start == 0:
            _check_first_bytes(path, raw)
        # A byte order mark is one at the start of a file only.
        text = TextIOWrapper(raw, encoding="utf-8" if start else "utf-8-sig", newline="")

        slices: Iterator[DocumentSlice]
        keys = keys or RecordKeys(kind=InvalidData)
        if layout == "records":
            slices = _records(path, text, text_field, start, keys)
        elif layout == "csv":
            slices = _rows(path, text, text_field, keys)
        else:
            slices = dict(zip(DOCUMENTS, (_whole, _lines, _paragraphs)))[layout](text)

        characters = 0
        try:
            for item in slices:
                yield item
                characters += len(item.text)
                if characters >= _REPORT:
                    characters = 0
                    report(consumed() - start)
            report(consumed() - start)
        except UnicodeDecodeError as error:
            packed = f" of what it unpacks to (as {compression})" if compression else ""
            rule = f"must be UTF-8, but byte {_offset(raw, error)}{packed} is not ({error.reason})"
            fix = "convert it, for example with iconv"
            raise invalid_data("", "encoding", ..., rule, fix, where=path) from None


def _check_first_bytes(path: Path, raw: BufferedReader) -> None:
    """Raise InvalidData for a file that begins as a tar does, or as text of two bytes a character."""
    head = raw.peek(_HEAD)[:_HEAD]
    if head[257:262] == b"ustar":
        raise tar_error(path)
    # English of UTF-16 is half NULs, and spaces are in any language: all of it may be valid UTF-8.
    nulls = head.count(0)
    if nulls > 1 and nulls * 20 > len(head):
        rule = f"must be UTF-8, and {nulls} of its first {len(head)} bytes are NUL, as of UTF-16, UTF-32 or no text"
        fix = "convert it, for example with iconv -f UTF-16LE -t UTF-8"
        raise invalid_data("", "utf16", ..., rule, fix, where=path)


def tar_error(path: Path) -> Any:
    """Return the error of an archive: its headers would be trained as text."""
    rule, fix = "is a tar, which forge-data does not read", "unpack it and prepare its files"
    return invalid_data("", "unsupported", ..., rule, fix, where=path)


def _offset(raw: BufferedReader, error: UnicodeDecodeError) -> int:
    return raw.tell() - len(error.object) + error.start


def _whole(text: TextIOWrapper) -> Iterator[DocumentSlice]:
    blank, item = "", text.read(SLICE)
    while item and not item.strip():  # leading white space belongs to the document if text follows
        blank, item = blank + item, text.read(SLICE)
    if not item:
        return
    item = blank + item
    while following := text.read(SLICE):
        yield DocumentSlice(item, last=False)
        item = following
    yield DocumentSlice(item, last=True)


def _lines(text: TextIOWrapper) -> Iterator[DocumentSlice]:
    for line in text:
        if line.strip():
            yield DocumentSlice(line.rstrip("\r\n"), last=True)


def _paragraphs(text: TextIOWrapper) -> Iterator[DocumentSlice]:
    lines: list[str] = []
    for line in text:
        if line.strip():
            lines.append(line)
        elif lines:
            yield DocumentSlice("".join(lines).rstrip("\r\n"), last=True)
            lines = []
    if lines:
        yield DocumentSlice("".join(lines).rstrip("\r\n"), last=True)


def _records(
    path: Path, text: TextIOWrapper, text_field: str, start: int, keys: RecordKeys
) -> Iterator[DocumentSlice]:
    fix, read = "correct the line", Keys(frozenset((text_field,)))
    for number, line in enumerate(text, start=1):
        if not line.strip():
            continue

        try:
            record = parse(line, "", InvalidData, fix)
            value = record.get(text_field) if isinstance(record, dict) else None
            if not isinstance(value, str):
                raise InvalidData([_no_text(record, text_field)])
            keys.check(read, record, "")
            if "\\u" in line and (wrong := _LONE_SURROGATE.search(value)):
                rule = (
                    f"has \\u{ord(wrong[0]):04x} alone, half a character, which UTF-8 cannot hold"
                )
                raise invalid_data(text_field, "surrogate", ..., rule, fix)

        except InvalidData as error:  # the number of a line costs a read of those before it
            raise InvalidData(error.problems, _line(path, start, number)) from None
        if value.strip():
            yield DocumentSlice(value, last=True)


def _rows(
    path: Path, text: TextIOWrapper, column: str, keys: RecordKeys
) -> Iterator[DocumentSlice]:
    csv.field_size_limit(_LONGEST_FIELD)  # the library's own is 131,072 characters
    rows = csv.reader(text, strict=True)
    try:
        names = next(rows, [])
        check_column(path, names, column)
        index = names.index(column)
        for row in rows:
            if len(row) != len(names) and row:  # an empty line has no fields
                where = f"{path} line {rows.line_num}"
                rule = f"fields must be {len(names)}, as in the header"
                fix = "quote fields with commas and line ends"
                raise invalid_data("", "columns", len(row), rule, fix, where=where)

            if row:
                found = dict(zip(names, row))
                keys.check(Keys(frozenset((column,))), found, f"{path} line {rows.line_num}")
            if row and row[index].strip():
                yield DocumentSlice(row[index], last=True)

    except csv.Error as error:
        where, fix = f"{path} line {rows.line_num}", "correct it"
        rule = f"must be CSV with commas and double quotes ({error})"
        raise invalid_data("", "not_csv", ..., rule, fix, where=where) from None


def _line(path: Path, start: int, number: int) -> str:
    """A line of a file by its number: those before `start` are counted only when there is an error."""
    with open_bytes(path, None, (0, start)) as (raw, _):
        number += sum(1 for _ in TextIOWrapper(raw, encoding="latin-1", newline=""))
    return f"{path} line {number}"


def _no_text(record: Any, field: str) -> Problem:
    """The problem of a line without text in `field`."""
    if not isinstance(record, dict):
        rule = f"is a {type(record).__name__} and must be an object with {field!r}"
        return Problem("", "type", ..., rule, "write one object a line")
    if field in record:
        fix = "give it text or leave the line out"
        return Problem(field, "type", record[field], "must be a string", fix)
    rule = f"must be a string, and the line has {', '.join(record)[:200]}"
    return Problem(field, "missing", ..., rule, "name its text_field (of prepare: --text_field)")
