"""Files of each format as indexed records.

`open_records(name, path)` reads an index (lines, members, rows), not the pictures.
"""

from __future__ import annotations

import csv
import glob
import hashlib
import io
import os
import re
import tarfile
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from forge_vlm._shared.jsonl import parse
from forge_vlm._shared.paths import user_path
from forge_vlm._shared.problems import ProblemError
from forge_vlm._shared.record_keys import CONTENT, Keys, RecordKeys, is_empty
from forge_vlm._shared.table_files import check_parquet, check_saved_set
from forge_vlm.data.conversations import from_chat, from_llava, index_of
from forge_vlm.data.errors import InvalidSample, invalid, readable
from forge_vlm.data.files import (
    check_tar_end,
    content_of,
    digest_of_files,
    files_of,
    folder_of,
    opened,
)
from forge_vlm.data.records import (
    Picture,
    Record,
    Records,
    Span,
    asked,
    captioned,
    interleaved,
    picture_of,
    video_of,
)

__all__ = ["FORMATS", "lines_of", "open_records"]

_PICTURES = ("jpg", "jpeg", "png", "webp", "bmp", "gif")
_CAPTIONS = ("text", "caption")
_MESSAGES = {"messages": from_chat, "conversations": from_llava}
_NOTE = Keys(frozenset(("image_id", "caption")))
#: Endings of members of a tar that hold what a sample could learn, beside the pictures that are read.
_MEMBERS = frozenset(("avi", "avif", "flac", "jp2", "m4a", "mkv", "mov", "mp3", "mp4", "ogg", "ppm", "tif", "tiff", "wav", "webm"))  # fmt: skip


class _List:
    """Records that are made from values of a list."""

    def __init__(
        self,
        values: Sequence[Any],
        make: Callable[[str, Any, Path], Record],
        path: Path,
        digest: str,
        folder: Path,
    ) -> None:
        self._values, self._make, self._path, self._digest = values, make, path, digest
        self._folder = folder

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: int) -> Record:
        return self._make(f"{self._path}, record {index}", self._values[index], self._folder)

    def fingerprint(self, cache: str | None = None) -> str:
        return self._digest


class _Lines:
    """Records of a JSON-lines file, of those lines that begin at `start` or behind and before `stop`: 8 bytes a line are
    held, and a line is read when it is asked for."""

    def __init__(
        self,
        path: Path,
        make: Callable[[str, Any, Path], Record],
        images: Path | None,
        start: int = 0,
        stop: int | None = None,
    ) -> None:
        self._path, self._make, self._start = path, make, start
        self._folder = images or path.parent
        digest, offset = hashlib.sha256(), start
        self._offsets = array("q")
        with opened(path) as file:
            if start:
                file.seek(start - 1)
                offset += len(file.readline()) - 1  # the rest of a line that began before
            while (stop is None or offset < stop) and (line := file.readline()):
                digest.update(line)
                if line.strip():
                    self._offsets.append(offset)
                offset += len(line)
        self._digest = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Record:
        at = f"byte {self._offsets[index]}" if self._start else f"record {index}"
        name = f"{self._path}, {at}"
        with opened(self._path) as file:
            file.seek(self._offsets[index])
            value = parse(file.readline(), name, InvalidSample)
        return self._make(name, value, self._folder)

    def fingerprint(self, cache: str | None = None) -> str:
        return self._digest


def _chat_lines(path: Path, keys: RecordKeys, images: Path | None, asks: bool = False) -> Records:
    return _Lines(path, partial(from_chat, asks=asks, keys=keys), images)


def _llava(path: Path, keys: RecordKeys, images: Path | None, asks: bool = False) -> Records:
    make = partial(from_llava, asks=asks, keys=keys)
    if path.suffix == ".jsonl":
        return _Lines(path, make, images)
    content = content_of(path)
    values = parse(content, str(path), InvalidSample)
    if not isinstance(values, list):
        rule = "must hold a list of records"
        raise invalid("", "not_list", ..., rule, "give LLaVA's JSON", where=path)
    return _List(values, make, path, hashlib.sha256(content).hexdigest(), images or path.parent)


def _coco(path: Path, keys: RecordKeys, images: Path | None, together: bool = False) -> Records:
    """COCO's captions file; images are in its folder, or in `images` or the folder of its split (`val2017` of
    captions_val2017.json) next to it or to its folder. A record is a caption, or `together` all captions of an image, in
    the order of the first of each."""
    content = content_of(path)
    value = parse(content, str(path), InvalidSample)
    try:
        files = {image["id"]: image["file_name"] for image in value["images"]}
        notes = value["annotations"]
        pairs = [(files[note["image_id"]], note["caption"]) for note in notes]
    except (KeyError, TypeError) as error:
        rule = f"must hold images with id and file_name, and annotations with image_id and caption ({error!r})"
        fix = "give a captions file of COCO"
        raise invalid("", "not_coco", ..., rule, fix, where=path) from error
    split, own = path.stem.rpartition("_")[2], path.absolute().parent
    near = [images] if images else [own, own / "images", own.parent, own.parent / "images"]
    places = [place for each in near for place in (each, each / split)]
    first = str(pairs[0][0]) if pairs else ""
    folder = next((p for p in places if os.path.lexists(p / first)), places[0])

    for number, note in enumerate(notes):  # here, as notes are not kept
        keys.check(_NOTE, note, f"{path}, annotation {number}")
    texts: dict[Any, list[Any]] = {}
    for file, text in pairs if together else ():
        texts.setdefault(file, []).append(text)

    def make(name: str, pair: Any, folder: Path) -> Record:
        more = pair[1] if together else [pair[1]]
        return captioned(name, more[0], [picture_of(name, pair[0], folder)], *more[1:])

    return _List(
        [*texts.items()] if together else pairs,
        make,
        path,
        hashlib.sha256(content).hexdigest(),
        folder,
    )


def _folder(path: Path, keys: RecordKeys, images: Path | None) -> Records:
    """A folder with metadata.csv or metadata.jsonl: file_name and text (or caption), as `imagefolder` of datasets."""

    def make(name: str, row: Any, folder: Path) -> Record:
        caption = _caption(name, row, keys, "file_name")
        return captioned(name, caption, [picture_of(name, row.get("file_name"), folder)])

    return _of_metadata(path, make, images, "file_name and text")


def _videos(path: Path, keys: RecordKeys, images: Path | None) -> Records:
    """A folder with metadata.csv or metadata.jsonl: file_name (or video), and question and answer, with options or columns
    a0, a1, ... where it is a choice (NExT-QA), or text (or caption)."""

    def make(name: str, row: Any, folder: Path) -> Record:
        file = "file_name" if row.get("file_name") else "video"
        given = row.get(file)
        if isinstance(given, str | int) and not Path(str(given)).suffix:
            given = f"{given}.mp4"  # tables of questions name videos by a number
        video = video_of(name, given, folder)
        if row.get("question"):
            own = (file, "question", "answer", "options", *(f"a{i}" for i in range(26)))
            keys.check(Keys(frozenset(own), CONTENT | {*_CAPTIONS}), row, name)
            return asked(name, row, [video])
        return captioned(name, _caption(name, row, keys, file), [video])

    return _of_metadata(path, make, images, "file_name, question and answer")


def _of_metadata(
    path: Path, make: Callable[[str, Any, Path], Record], images: Path | None, columns: str
) -> Records:
    lines, table = path / "metadata.jsonl", path / "metadata.csv"
    index = lines if lines.exists() else table
    if not index.exists():
        rule = f"must hold metadata.jsonl or metadata.csv with {columns}"
        raise invalid("", "no_metadata", ..., rule, "write one", where=path)
    content = content_of(index)
    rows: list[Any]
    if index == lines:
        rows = [
            parse(line, str(index), InvalidSample) for line in content.splitlines() if line.strip()
        ]
    else:
        try:
            # a quoted field may hold line breaks, and spreadsheets write a mark before the first
            text = io.StringIO(content.decode("utf-8-sig"), newline="")
            reader = csv.DictReader(text, strict=True)
            rows = list(reader)
        except (UnicodeDecodeError, csv.Error) as error:
            rule = f"must be CSV in UTF-8 ({error})"
            raise invalid("", "not_csv", ..., rule, "correct it", where=index) from error
        names = list(reader.fieldnames or ())
        twice = [name for name in names if names.count(name) > 1]
        long = next((number for number, row in enumerate(rows) if None in row), None)
        if (
            twice or long is not None
        ):  # a column, or the rest of a caption with a comma, would be lost
            code, value = ("duplicate", twice[0]) if twice else ("columns", long)
            rule = "is a column twice" if twice else f"is a row of more than {len(names)} fields"
            fix = "rename one" if twice else "quote fields with commas"
            raise invalid("", code, value, rule, fix, where=index)

    def of_row(name: str, row: Any, folder: Path) -> Record:
        return make(name, row if isinstance(row, Mapping) else {}, folder)

    return _List(rows, of_row, index, hashlib.sha256(content).hexdigest(), images or path)


def _parquet(path: Path, keys: RecordKeys, images: Path | None) -> Records:
    """Parquet files with a column `image` or `images` of bytes (or `{"bytes", "path"}`), and one of captions or
    messages."""
    sets = _datasets("parquet")
    from pyarrow.parquet import read_metadata

    files = files_of(path, "parquet")
    for file in files:  # the library would wait for a FIFO
        opened(file).close()
    try:
        # the library takes names of files for patterns
        names = [_root_name(file) for file in files]
        if any(os.path.expandvars(name) != name for name in names):
            rule = "must not hold the name of an environment variable, which datasets replaces"
            raise invalid("path", "variable", str(path), rule, "rename it")
        for file in files:
            check_parquet(file, read_metadata(file), InvalidSample)
        names = [glob.escape(name) for name in names]
        each = [sets.Dataset.from_parquet(name, keep_in_memory=False) for name in names]
        return _Rows(sets.concatenate_datasets(each), path, files, keys, images)
    except InvalidSample:
        raise
    except Exception as error:
        rule = f"cannot be read as parquet ({error})"
        raise invalid("", "bad_parquet", ..., rule, "restore it", where=path) from error


def _root_name(path: Path) -> str:
    """A path from the root, as the library expands `~ada`; InvalidSample for `::`, which it divides at."""
    if "::" in (name := str(path.absolute())):
        rule, fix = "must not hold '::', which datasets takes for a chain of addresses", "rename it"
        raise invalid("path", "chain", str(path.parent if path.is_file() else path), rule, fix)
    return name


def _datasets(format: str) -> Any:
    """The library; ValueError where it is not installed."""
    try:
        import datasets
    except ImportError as error:
        fix = "install 'forge-vlm[data]'"
        rule = "needs datasets"
        raise invalid("format", "requires", format, rule, fix, kind=ProblemError) from error
    return datasets


def _saved_set(path: Path, keys: RecordKeys, images: Path | None) -> Records:
    """A set of `datasets` that `save_to_disk` wrote, with columns as of parquet."""
    sets = _datasets("dataset")
    try:
        name = _root_name(path)
        check_saved_set(path, InvalidSample)
        found: Any = sets.load_from_disk(name)
    except InvalidSample:
        raise
    except Exception as error:
        rule = f"must be a folder that save_to_disk wrote ({error})"
        raise invalid("", "not_saved", ..., rule, "check the path", where=path) from error
    if isinstance(found, Mapping):
        rule = f"holds the splits {', '.join(found)}"
        fix = f"name the folder of one, {path / next(iter(found))}"
        raise invalid("", "splits", ..., rule, fix, where=path)
    # its own files: the library may write others next to them, which a resume would take for another set
    files = sorted(Path(each["filename"]) for each in found.cache_files)
    return _Rows(found, path, files, keys, images)


class _Rows:
    """Rows of a set whose columns are those of a sample."""

    def __init__(
        self, rows: Any, path: Path, files: list[Path], keys: RecordKeys, images: Path | None
    ) -> None:
        from datasets import Image, List

        self._path, self._files, self._keys = path, files, keys
        self._folder = images or (path if path.is_dir() else path.parent)
        names = rows.column_names
        self._text = next((n for n in (*_MESSAGES, *_CAPTIONS) if n in names), None)
        columns = [n for n in ("image", "images") if n in names]
        if self._text is None or (not columns and self._text not in _MESSAGES):
            wanted = ", ".join((*_MESSAGES, *_CAPTIONS))
            rule = f"must have image (or images) and one of {wanted}"
            raise invalid("columns", "missing", names, rule, "rename them", where=path)
        for name in columns:  # pictures stay as they are encoded
            feature = rows.features[name]
            if isinstance(feature, Image):
                rows = rows.cast_column(name, Image(decode=False))
            elif isinstance(getattr(feature, "feature", None), Image):
                rows = rows.cast_column(name, List(Image(decode=False)))
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Record:
        name, row, folder = f"{self._path}, record {index}", self._rows[index], self._folder
        if self._text in _MESSAGES:
            return _MESSAGES[self._text](name, row, folder, keys=self._keys)
        image = "image" if not is_empty(row.get("image")) else "images"
        pictures = [picture_of(name, each, folder) for each in _listed(row.get(image))]
        return captioned(name, _caption(name, row, self._keys, image), pictures)

    def fingerprint(self, cache: str | None = None) -> str:
        return digest_of_files(self._files, cache)


class _Tar:
    """Samples of WebDataset: members of one stem, a picture or several (`a.0.png`), and `.txt` or `.json` (messages,
    conversations, a caption, or `texts` with null where a picture stands). Its pictures are in the order of their names, or
    of `image` or `images` of the JSON, which names them."""

    def __init__(self, path: Path, keys: RecordKeys, images: Path | None) -> None:
        self._keys = keys
        self._folder = images or (path if path.is_dir() else path.parent)
        self._files = files_of(path, "tar")
        # members by sample and the rest of their name
        self._samples: list[tuple[str, dict[str, Span]]] = []
        for file in self._files:
            self._index(file)

    def _index(self, file: Path) -> None:
        try:
            with opened(file) as content, tarfile.open(fileobj=content, mode="r:") as tar:
                members = [m for m in tar if m.isfile()]
                check_tar_end(content, tar.offset, file)
        except (tarfile.TarError, OSError, EOFError) as error:
            rule = f"cannot be read as tar without compression ({error})"
            raise invalid("", "bad_tar", ..., rule, "restore or unpack it", where=file) from error
        for member in members:
            folder, _, base = member.name.rpartition("/")
            stem, _, ending = base.partition(".")
            if not stem:  # "._a.png", which tar of macOS writes beside "a.png"
                continue
            name = f"{folder}/{stem}"
            if not self._samples or self._samples[-1][0] != f"{file}: {name}":
                self._samples.append((f"{file}: {name}", {}))
            found = self._samples[-1][1]
            if ending.lower() in found:
                rule, fix = "is there twice in one sample", "give each sample a name of its own"
                raise invalid("", "duplicate", member.name, rule, fix, where=file)
            found[ending.lower()] = Span(file, member.offset_data, member.size)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Record:
        name, members = self._samples[index]
        images = [ending for ending in members if ending.rpartition(".")[2] in _PICTURES]
        text = "txt" if "txt" in members else "json"
        kinds = {ending: ending.rpartition(".")[2] for ending in members}
        unread = {kind: ending for ending, kind in kinds.items() if ending not in images}
        self._keys.check(Keys(frozenset((text,)), _MEMBERS), unread, name)
        pictures = [
            Picture(f"{name}.{ending}", members[ending])
            for ending in sorted(images, key=_by_number)
        ]
        if text == "txt":
            try:
                caption = self._read(name, members["txt"]).decode().strip()
            except UnicodeDecodeError as error:
                rule, where = f"must be UTF-8 ({error})", f"{name}.txt"
                raise invalid("", "not_utf8", ..., rule, "correct it", where=where) from error
            return captioned(name, caption, pictures)
        if "json" not in members:
            rule = f"has {', '.join(members)}, and must have .txt or .json next to its pictures"
            raise invalid("", "no_text", ..., rule, "add one", where=name)
        value = parse(self._read(name, members["json"]), f"{name}.json", InvalidSample)
        given = dict(value) if isinstance(value, Mapping) else {}
        pictures = self._in_order(name, given, pictures)
        layout = next((key for key in _MESSAGES if key in given), None)
        if layout is not None:
            given["images"] = [{"bytes": p.content, "path": p.name} for p in pictures]
            return _MESSAGES[layout](name, given, self._folder, keys=self._keys)
        if "texts" in given:
            self._keys.check(Keys(frozenset(("texts",))), given, name)
            return interleaved(name, given["texts"], pictures)
        return captioned(name, _caption(name, given, self._keys), pictures)

    def _in_order(self, name: str, value: dict[str, Any], pictures: list[Picture]) -> list[Picture]:
        """Pictures in the order in which the JSON names them under `image` or `images`, which are taken out of it."""
        named = []
        for key in ("image", "images"):
            given = value.pop(key, None)
            if key not in self._keys.ignored:
                named += [_name_of(name, e, pictures) for e in _listed(given) if not is_empty(e)]
        if len(named) <= 1 and len(pictures) == 1:
            return pictures  # it may name the file that the member was made from

        left: list[dict[str, Any]] = [{"path": p.name, "picture": p} for p in pictures]
        order = [left.pop(index_of(name, each, left))["picture"] for each in named]
        if named and left:
            rule = f"must name all {len(pictures)} pictures of its sample"
            raise invalid("images", "number", len(named), rule, "name each", where=name)
        return order or pictures

    def _read(self, name: str, member: Span) -> bytes:
        return Picture(name, member).read()

    def fingerprint(self, cache: str | None = None) -> str:
        return digest_of_files(self._files, cache)


def _name_of(name: str, each: Any, pictures: list[Picture]) -> str:
    """The name of the picture that an entry of `images` means: its name, `{"path": name}`, or its number from 0."""
    if isinstance(each, Mapping):
        each = next(
            (each[key] for key in ("path", "url", "index") if each.get(key) is not None), None
        )
    if type(each) is int and 0 <= each < len(pictures):
        return pictures[each].name
    if isinstance(each, str):
        return each
    rule = "must be the name of a picture of its sample, or its number from 0"
    raise invalid("images", "type", each, rule, "name it", where=name)


def _listed(value: Any) -> list[Any]:
    return [] if is_empty(value) else value if isinstance(value, list) else [value]


def _by_number(ending: str) -> list[tuple[int, str]]:
    """A key that puts `2.png` before `10.png`."""
    parts = re.findall(r"[0-9]+|[^0-9]+", ending)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _caption(name: str, row: Mapping[str, Any], keys: RecordKeys, *read: str) -> Any:
    """The caption of a row of which `read` are read, too; a second caption would be lost."""
    key = next((key for key in _CAPTIONS if row.get(key)), _CAPTIONS[0])
    keys.check(Keys(frozenset((key, *read)), CONTENT | {*_CAPTIONS}), row, name)
    return row.get(key)


FORMATS: dict[str, Callable[..., Records]] = {
    "chat": _chat_lines,
    "llava": _llava,
    "coco": _coco,
    "coco_trees": partial(_coco, together=True),
    "folder": _folder,
    "videos": _videos,
    "parquet": _parquet,
    "dataset": _saved_set,
    "webdataset": _Tar,
}


def lines_of(
    name: str, path: Path, start: int, stop: int, keys: RecordKeys | None, images: Path | None
) -> Records:
    """The records of lines that begin in a range of bytes of a file of chat or LLaVA's lines."""
    make = {"chat": from_chat, "llava": from_llava}[name]
    return _Lines(path, partial(make, keys=keys), images, start, stop)


_ASKING = ("chat", "llava")  # formats whose records may be questions alone


def open_records(
    name: str,
    path: str | Path,
    asks: bool = False,
    keys: RecordKeys | None = None,
    images: str | Path | None = None,
) -> Records:
    """The records of a path in a format by name; InvalidSample where it is not there or is no such file.

    Of those that only `asks`, conversations of chat and llava may end with a question. `keys` counts keys that are not
    read. `images` is the folder below which paths in records are; without it they are below that of the file."""
    path = user_path(path)
    with readable(path):
        if not path.exists():
            raise invalid("path", "not_found", str(path), "must exist", "check it")
        keys = keys or RecordKeys(kind=InvalidSample)
        if asks and name in _ASKING:
            return FORMATS[name](path, keys, folder_of(images), asks=True)
        return FORMATS[name](path, keys, folder_of(images))
