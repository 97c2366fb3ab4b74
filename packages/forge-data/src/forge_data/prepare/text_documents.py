"""Documents of text: a whole file, its lines, its paragraphs, the records of JSON lines, or the rows of CSV."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple

from forge_data._shared.jsonl import parse
from forge_data._shared.problems import Problem, invalid
from forge_data._shared.record_keys import Keys, RecordKeys
from forge_data.errors import InvalidData
from forge_data.prepare.byte_streams import open_bytes

__all__ = ["DOCUMENT_KINDS", "PIECE", "Piece", "read_text", "tar_error"]

DOCUMENT_KINDS = ("file", "line", "blank_line")
PIECE = 1 << 20  # characters of a piece when the whole file is one document
_LONGEST_FIELD = 2**31 - 1  # of CSV, in characters
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # json makes one character of a pair
_HEAD = 4096  # bytes by which other formats are told
_REPORT = 1 << 16  # characters between two reports


class Piece(NamedTuple):
    """A part of a document's text; `last` for the last part."""

    text: str
    last: bool


def read_text(
    path: Path,
    document: str,
    text_field: str,
    compression: str | None,
    report: Callable[[int], None],
    part: tuple[int, int] | None = None,
    keys: RecordKeys | None = None,
) -> Iterator[Piece]:
    """The documents of a text file. `document` is one of DOCUMENT_KINDS, or "records" of JSON lines and "csv" for the
    texts in `text_field`, whose other keys `keys` count.

    `part` is a range of bytes that starts and ends where documents do. Raises InvalidData for bytes that
    are not UTF-8, text of UTF-16, a tar, lines that are not JSON objects with a text and rows that are not those of the header.
    """
    start = part[0] if part else 0
    with open_bytes(path, compression, part) as (raw, consumed):
        if start == 0:
            _refuse_other_bytes(path, raw)
        # A byte order mark is one at the start of a file only.
        text = TextIOWrapper(raw, encoding="utf-8" if start else "utf-8-sig", newline="")
        pieces: Iterator[Piece]
        keys = keys or RecordKeys(kind=InvalidData)
        if document == "records":
            pieces = _records(path, text, text_field, start, keys)
        elif document == "csv":
            pieces = _rows(path, text, text_field, keys)
        else:
            pieces = {"file": _whole, "line": _lines, "blank_line": _paragraphs}[document](text)
        characters = 0
        try:
            for piece in pieces:
                yield piece
                characters += len(piece.text)
                if characters >= _REPORT:
                    characters = 0
                    report(consumed() - start)
            report(consumed() - start)
        except UnicodeDecodeError as error:
            packed = f" of what it unpacks to (as {compression})" if compression else ""
            rule = f"must be UTF-8, but byte {_offset(raw, error)}{packed} is not ({error.reason})"
            fix = "convert it, for example with iconv"
            raise invalid("", "encoding", ..., rule, fix, where=path, kind=InvalidData) from None


def _refuse_other_bytes(path: Path, raw: BufferedReader) -> None:
    """Raise InvalidData for a file that begins as a tar does, or as text of two bytes a character."""
    head = raw.peek(_HEAD)[:_HEAD]
    if head[257:262] == b"ustar":
        raise tar_error(path)
    # English of UTF-16 is half NULs, and spaces are in any language: all of it may be valid UTF-8.
    nulls = head.count(0)
    if nulls > 1 and nulls * 20 > len(head):
        rule = f"must be UTF-8, and {nulls} of its first {len(head)} bytes are NUL, as of UTF-16, UTF-32 or no text"
        fix = "convert it, for example with iconv -f UTF-16LE -t UTF-8"
        raise invalid("", "utf16", ..., rule, fix, where=path, kind=InvalidData)


def tar_error(path: Path) -> Any:
    """The error of an archive, whose headers would be learned."""
    rule, fix = "is a tar, which forge-data does not read", "unpack it and prepare its files"
    return invalid("", "unsupported", ..., rule, fix, where=path, kind=InvalidData)


def _offset(raw: BufferedReader, error: UnicodeDecodeError) -> int:
    return raw.tell() - len(error.object) + error.start


def _whole(text: TextIOWrapper) -> Iterator[Piece]:
    blank, piece = "", text.read(PIECE)
    while (
        piece and not piece.strip()
    ):  # leading white space belongs to the document if text follows
        blank, piece = blank + piece, text.read(PIECE)
    if not piece:
        return
    piece = blank + piece
    while following := text.read(PIECE):
        yield Piece(piece, last=False)
        piece = following
    yield Piece(piece, last=True)


def _lines(text: TextIOWrapper) -> Iterator[Piece]:
    for line in text:
        if line.strip():
            yield Piece(line.rstrip("\r\n"), last=True)


def _paragraphs(text: TextIOWrapper) -> Iterator[Piece]:
    lines: list[str] = []
    for line in text:
        if line.strip():
            lines.append(line)
        elif lines:
            yield Piece("".join(lines).rstrip("\r\n"), last=True)
            lines = []
    if lines:
        yield Piece("".join(lines).rstrip("\r\n"), last=True)


def _records(
    path: Path, text: TextIOWrapper, text_field: str, start: int, keys: RecordKeys
) -> Iterator[Piece]:
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
                raise invalid(text_field, "surrogate", ..., rule, fix, kind=InvalidData)
        except InvalidData as error:  # the number of a line costs a read of those before it
            raise InvalidData(error.problems, _line(path, start, number)) from None
        if value.strip():
            yield Piece(value, last=True)


def _rows(path: Path, text: TextIOWrapper, column: str, keys: RecordKeys) -> Iterator[Piece]:
    csv.field_size_limit(_LONGEST_FIELD)  # the library's own is 131,072 characters
    rows = csv.reader(text, strict=True)
    try:
        names = next(rows, [])
        if names.count(column) != 1:
            rule = f"must be one of its columns, {', '.join(names)[:200] or 'none'}"
            if column in names:
                rule = f"must be one column, and {names.count(column)} have that name"
            code = "duplicate" if column in names else "missing"
            fix = "name the one with the text with text_field (--text_field)"
            raise invalid("text_field", code, column, rule, fix, where=path, kind=InvalidData)

        index = names.index(column)
        for row in rows:
            if len(row) != len(names) and row:  # an empty line has no fields
                where = f"{path} line {rows.line_num}"
                rule = f"fields must be {len(names)}, as in the header"
                fix = "quote fields with commas and line ends"
                raise invalid("", "columns", len(row), rule, fix, where=where, kind=InvalidData)

            if row:
                found = dict(zip(names, row))
                keys.check(Keys(frozenset((column,))), found, f"{path} line {rows.line_num}")
            if row and row[index].strip():
                yield Piece(row[index], last=True)

    except csv.Error as error:
        where, fix = f"{path} line {rows.line_num}", "correct it"
        rule = f"must be CSV with commas and double quotes ({error})"
        raise invalid("", "not_csv", ..., rule, fix, where=where, kind=InvalidData) from None


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
    return Problem(field, "missing", ..., rule, "name its field with text_field (--text_field)")
