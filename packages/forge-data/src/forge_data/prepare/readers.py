"""Text files as documents, piece by piece: memory is bounded by a piece, not by a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import NamedTuple

from forge_data.errors import DataError

DOCUMENT_KINDS = ("file", "line", "blank_line")
SUFFIXES = (".txt", ".md", ".jsonl")
_PIECE = 1 << 20  # characters of a piece when the whole file is one document


class Piece(NamedTuple):
    """Part of a document's text. `last` ends the document."""

    text: str
    last: bool


def find_inputs(inputs: Sequence[Path]) -> list[Path]:
    """Files as given, folders as the .txt, .md and .jsonl files in them, sorted; hidden ones left out.

    Raises DataError for a path that is not there and a folder without such a file.
    """
    files: list[Path] = []
    for path in inputs:
        if path.is_file():
            files.append(path)
            continue
        if not path.is_dir():
            raise DataError(f"input {path} must be a file or a folder; check the path")
        found = sorted(
            p
            for p in path.rglob("*")
            if p.suffix in SUFFIXES
            and p.is_file()
            and not any(part.startswith(".") for part in p.relative_to(path).parts)
        )
        if not found:
            raise DataError(
                f"input folder {path} must hold {', '.join(SUFFIXES)} files; "
                "name other files one by one"
            )
        files.extend(found)
    return files


def read_pieces(
    path: Path, document: str, text_field: str, seen: Callable[[int], None]
) -> Iterator[Piece]:
    """The documents of one file. `seen` is told how many bytes of it were read so far.

    `document` is "file", "line" or "blank_line" (paragraphs); a .jsonl file has one document a line,
    in `text_field`. Line ends stay as they are inside a document. Documents of white space alone are
    left out. Raises DataError for bytes that are not UTF-8 and for lines that are not such JSON.
    """
    with path.open("rb") as raw:
        text = TextIOWrapper(raw, encoding="utf-8-sig", newline="")
        pieces: Iterator[Piece]
        if path.suffix == ".jsonl":
            pieces = _records(path, text, text_field)
        else:
            pieces = {"file": _whole, "line": _lines, "blank_line": _paragraphs}[document](text)
        try:
            for piece in pieces:
                yield piece
                seen(raw.tell())
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path} must be UTF-8, but byte {_offset(raw, error)} is not "
                f"({error.reason}); convert it, for example with iconv"
            ) from None


def _offset(raw: BufferedReader, error: UnicodeDecodeError) -> int:
    return raw.tell() - len(error.object) + error.start


def _whole(text: TextIOWrapper) -> Iterator[Piece]:
    blank, piece = "", text.read(_PIECE)
    while piece and not piece.strip():  # white space at the front is kept only if text follows
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
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path} line {number} must be JSON ({error.msg}); correct the line"
            ) from None
        value = record.get(text_field) if isinstance(record, dict) else None
        if not isinstance(value, str):
            keys = ", ".join(record) if isinstance(record, dict) else type(record).__name__
            raise DataError(
                f"{path} line {number} must have a string {text_field!r} (it has: {keys}); "
                "name the field with --text_field"
            )
        if value.strip():
            yield Piece(value, last=True)
