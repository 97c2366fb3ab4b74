"""Text files are read as pieces of documents: memory is bounded by a piece, not by a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple

from forge_data.errors import InvalidData

DOCUMENT_KINDS = ("file", "line", "blank_line")
SUFFIXES = (".txt", ".md", ".jsonl")
_PIECE = 1 << 20  # characters of a piece when the whole file is one document
#: First bytes of formats that are often tried, and the way to make text of them.
_FORMATS = {
    b"PAR1": ("parquet", "write its text column as .jsonl"),
    b"ARROW1": ("Arrow", "write its text column as .jsonl"),
    b"\x1f\x8b": ("gzip", "unpack it with gunzip"),
    b"(\xb5/\xfd": ("zstd", "unpack it with unzstd"),
    b"BZh": ("bzip2", "unpack it with bunzip2"),
    b"\xfd7zXZ": ("xz", "unpack it with unxz"),
    b"PK\x03\x04": ("zip", "unpack it with unzip"),
    b"%PDF": ("PDF", "extract its text, for example with pdftotext"),
}


class Piece(NamedTuple):
    """A part of a document's text; `last` for the last part."""

    text: str
    last: bool


def find_inputs(inputs: Sequence[Path]) -> list[Path]:
    """The given files, and of each folder its .txt, .md and .jsonl files, sorted, without hidden ones.

    Raises InvalidData for a path that does not exist and for a folder without such a file.
    """
    files: list[Path] = []
    for path in inputs:
        if path.is_file():
            files.append(path)
            continue
        if not path.is_dir():
            raise InvalidData(f"input {path} must be a file or a folder; check the path")
        found = sorted(
            p
            for p in path.rglob("*")
            if p.suffix in SUFFIXES
            and p.is_file()
            and not any(part.startswith(".") for part in p.relative_to(path).parts)
        )
        if not found:
            raise InvalidData(
                f"input folder {path} must hold {', '.join(SUFFIXES)} files; "
                "name other files one by one"
            )
        files.extend(found)
    return files


def read_pieces(
    path: Path, document: str, text_field: str, report: Callable[[int], None]
) -> Iterator[Piece]:
    """The documents of one file. `report` is called with the number of bytes read so far.

    `document` is "file", "line" or "blank_line" (paragraphs); a .jsonl file has one document a line,
    in `text_field`. Line ends inside a document do not change. Documents of white space alone are
    skipped. Raises InvalidData for bytes that are not UTF-8, for formats that are not read (parquet,
    compressed files) and for lines that are not JSON objects with a text.
    """
    with path.open("rb") as raw:
        _refuse_other_formats(path, raw)
        text = TextIOWrapper(raw, encoding="utf-8-sig", newline="")
        pieces: Iterator[Piece]
        if path.suffix == ".jsonl":
            pieces = _records(path, text, text_field)
        else:
            pieces = {"file": _whole, "line": _lines, "blank_line": _paragraphs}[document](text)
        try:
            for piece in pieces:
                yield piece
                report(raw.tell())
        except UnicodeDecodeError as error:
            raise InvalidData(
                f"{path} must be UTF-8, but byte {_offset(raw, error)} is not "
                f"({error.reason}); convert it, for example with iconv"
            ) from None


def _refuse_other_formats(path: Path, raw: BufferedReader) -> None:
    first = raw.peek(8)
    for magic, (name, fix) in _FORMATS.items():
        if first.startswith(magic):
            raise InvalidData(
                f"{path} is a {name} file, which forge-data does not read yet; {fix} and prepare that"
            )


def _offset(raw: BufferedReader, error: UnicodeDecodeError) -> int:
    return raw.tell() - len(error.object) + error.start


def _whole(text: TextIOWrapper) -> Iterator[Piece]:
    blank, piece = "", text.read(_PIECE)
    while (
        piece and not piece.strip()
    ):  # leading white space belongs to the document if text follows
        blank, piece = blank + piece, text.read(_PIECE)
    if not piece:
        return
    piece = blank + piece
    while following := text.read(_PIECE):
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


def _records(path: Path, text: TextIOWrapper, text_field: str) -> Iterator[Piece]:
    for number, line in enumerate(text, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except RecursionError:
            raise InvalidData(
                f"{path} line {number} must be JSON of a few levels, not nested deep; correct the line"
            ) from None
        except ValueError as error:  # no JSON, or an integer of thousands of digits
            raise InvalidData(
                f"{path} line {number} must be JSON ({error}); correct the line"
            ) from None
        value = record.get(text_field) if isinstance(record, dict) else None
        if not isinstance(value, str):
            raise InvalidData(f"{path} line {number} {_no_text(record, text_field)}")
        if value.strip():
            yield Piece(value, last=True)


def _no_text(record: Any, text_field: str) -> str:
    """The problem of a line without text in `text_field`, and its fix."""
    if isinstance(record, dict) and text_field in record:
        value = json.dumps(record[text_field])[:40]
        return f"has {value} as {text_field!r}, which must be a string; give it text or leave the line out"
    keys = ", ".join(record)[:200] if isinstance(record, dict) else type(record).__name__
    return (
        f"must have a string {text_field!r} (it has: {keys}); "
        "name its field with text_field (--text_field)"
    )
