"""Files of text in several formats are read as pieces of documents: memory is bounded by a piece, not by a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from forge_data._shared.problems import invalid
from forge_data._shared.record_keys import RecordKeys
from forge_data.errors import InvalidData
from forge_data.folders import files_below
from forge_data.prepare.byte_streams import COMPRESSIONS
from forge_data.prepare.parquet import read_parquet
from forge_data.prepare.text_documents import DOCUMENT_KINDS, Piece, read_text, tar_error

__all__ = [
    "DOCUMENT_KINDS",
    "Format",
    "Piece",
    "find_inputs",
    "format_of",
    "not_read",
    "read_pieces",
]

_RECORDS = (".jsonl", ".ndjson", ".json")
_TEXT = (".txt", ".md", ".jsonl", ".ndjson", ".csv")
#: Of archives, whose files would become one document with their headers.
_TAR = (".tar", ".tgz", ".tbz2", ".txz", ".tzst", *(f".tar{packed}" for packed in COMPRESSIONS))
#: Endings of names that are looked for in folders. What is .json there often describes the others; packed, it is lines.
_PACKED = tuple(text + packed for text in (*_TEXT, ".json") for packed in COMPRESSIONS)
SUFFIXES = (*_TEXT, *_PACKED, ".parquet")
#: First bytes of formats that are read -> name and the ending by which they are told.
_READ = {
    b"PAR1": ("parquet", ".parquet"),
    b"\x1f\x8b": ("gzip", ".gz"),
    b"(\xb5/\xfd": ("zstd", ".zst"),
    b"BZh": ("bzip2", ".bz2"),
    b"\xfd7zXZ": ("xz", ".xz"),
}
#: First bytes of formats that are often tried, and the way to make text of them.
_NOT_READ = {
    b"ARROW1": ("Arrow", "write its text column as parquet or .jsonl"),
    b"PK\x03\x04": ("zip", "unpack it with unzip"),
    b"%PDF": ("PDF", "extract its text, for example with pdftotext"),
}


class Format(NamedTuple):
    """What a file's name says: `kind` "text", "records", "csv" or "parquet", `compression` one of COMPRESSIONS or None."""

    kind: str
    compression: str | None


def format_of(path: Path) -> Format:
    """The format of a file by the ending of its name, in any case. Unknown endings are text."""
    compression = COMPRESSIONS.get(path.suffix.lower())
    suffix = (Path(path.stem).suffix if compression else path.suffix).lower()
    kind = {".parquet": "parquet", ".csv": "csv"}.get(suffix, "text")
    return Format("records" if suffix in _RECORDS else kind, compression)


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
            raise invalid("inputs", "not_found", name, rule, "check the path", kind=InvalidData)

        found = files_below(path, lambda name: name.lower().endswith((*SUFFIXES, *_TAR)))
        for file in found:
            if file.name.lower().endswith(_TAR):
                raise tar_error(file)
        if not found:
            rule = f"must hold {', '.join(_TEXT)} files (also with {', '.join(COMPRESSIONS)}) or .parquet files"
            fix, name = "name other files one by one", str(path)
            raise invalid("inputs", "no_files", name, rule, fix, kind=InvalidData)
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


def read_pieces(
    path: Path,
    document: str,
    text_field: str,
    report: Callable[[int], None],
    part: tuple[int, int] | None = None,
    keys: RecordKeys | None = None,
) -> Iterator[Piece]:
    """The documents of one file. `report` is called with the number of its bytes read so far; `keys` count what is not read
    of records and rows.

    `document` is "file", "line" or "blank_line" (paragraphs) in text; a .jsonl, .ndjson or .json file has one
    document a line, a .csv and a .parquet file one a row, in `text_field`. Names may end in those of COMPRESSIONS. Line ends in a
    document do not change. Documents of white space alone are skipped. `part` is a range of the file at
    whose ends documents end: bytes of text, row groups of parquet; packed files and .csv have no parts.

    Raises InvalidData for bytes that are not UTF-8, for text of UTF-16, for damaged files, for formats that are not read and
    for lines and rows without a text; ValueError if a format's library is not installed.
    """
    kind, compression = format_of(path)
    _refuse_other_formats(path, kind, compression)
    if kind == "parquet":
        return read_parquet(path, text_field, report, part, keys)
    document = document if kind == "text" else kind
    return read_text(path, document, text_field, compression, report, part, keys)


def _refuse_other_formats(path: Path, kind: str, compression: str | None) -> None:
    """Raise InvalidData for a file whose first bytes are those of another format than its name says."""
    if kind == "parquet" and compression:
        rule = "is a packed parquet file, and row groups are read by their position"
        raise invalid("", "packed", ..., rule, "unpack it first", where=path, kind=InvalidData)
    with path.open("rb") as raw:
        first = raw.read(8)
    if path.name.lower().endswith(_TAR):
        raise tar_error(path)
    for magic, (name, ending) in _READ.items():
        if first.startswith(magic) and name not in (kind, compression):
            rule, fix = (
                f"is a {name} file by its first bytes, and not by its name",
                f"rename it to end in {ending}",
            )
            raise invalid("", "ending", ..., rule, fix, where=path, kind=InvalidData)
    for magic, (name, fix) in _NOT_READ.items():
        if first.startswith(magic):
            rule, fix = (
                f"is a {name} file, which forge-data does not read",
                f"{fix} and prepare that",
            )
            raise invalid("", "unsupported", ..., rule, fix, where=path, kind=InvalidData)
