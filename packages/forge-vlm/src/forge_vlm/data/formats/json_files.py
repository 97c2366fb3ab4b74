"""Records of JSON, JSON lines and CSV files: chat, LLaVA, COCO, folders of images and of videos."""

from __future__ import annotations

import csv
import hashlib
import io
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from forge_vlm._shared.jsonl import parse
from forge_vlm._shared.record_keys import CONTENT, Keys, RecordKeys
from forge_vlm.data.conversations import from_chat, from_llava
from forge_vlm.data.files import InvalidSample, content_of, invalid, opened
from forge_vlm.data.records import Record, Records, asked, captioned, picture_of, video_of

CAPTIONS = ("text", "caption")
MESSAGES = {"messages": from_chat, "conversations": from_llava}
_NOTE = Keys(frozenset(("image_id", "caption")))


class ListedRecords:
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


class JsonLines:
    """Records of a JSON-lines file, of those lines that begin at `start` or after and before `stop`: 8 bytes a line are
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


def open_chat(path: Path, keys: RecordKeys, images: Path | None, asks: bool = False) -> Records:
    return JsonLines(path, partial(from_chat, asks=asks, keys=keys), images)


def open_llava(path: Path, keys: RecordKeys, images: Path | None, asks: bool = False) -> Records:
    make = partial(from_llava, asks=asks, keys=keys)
    if path.suffix == ".jsonl":
        return JsonLines(path, make, images)
    content = content_of(path)
    values = parse(content, str(path), InvalidSample)
    if not isinstance(values, list):
        rule = "must hold a list of records"
        raise invalid("", "not_list", ..., rule, "give LLaVA's JSON", where=path)
    return ListedRecords(
        values, make, path, hashlib.sha256(content).hexdigest(), images or path.parent
    )


def open_coco(path: Path, keys: RecordKeys, images: Path | None, together: bool = False) -> Records:
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

    return ListedRecords(
        [*texts.items()] if together else pairs,
        make,
        path,
        hashlib.sha256(content).hexdigest(),
        folder,
    )


def open_image_folder(path: Path, keys: RecordKeys, images: Path | None) -> Records:
    """A folder with metadata.csv or metadata.jsonl: file_name and text (or caption), as `imagefolder` of datasets."""

    def make(name: str, row: Any, folder: Path) -> Record:
        caption = caption_of(name, row, keys, "file_name")
        return captioned(name, caption, [picture_of(name, row.get("file_name"), folder)])

    return _of_metadata(path, make, images, "file_name and text")


def open_video_folder(path: Path, keys: RecordKeys, images: Path | None) -> Records:
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
            keys.check(Keys(frozenset(own), CONTENT | {*CAPTIONS}), row, name)
            return asked(name, row, [video])
        return captioned(name, caption_of(name, row, keys, file), [video])

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

    return ListedRecords(rows, of_row, index, hashlib.sha256(content).hexdigest(), images or path)


def caption_of(name: str, row: Mapping[str, Any], keys: RecordKeys, *read: str) -> Any:
    """The caption of a sequence of which `read` are read, too; a second caption would be lost."""
    key = next((key for key in CAPTIONS if row.get(key)), CAPTIONS[0])
    keys.check(Keys(frozenset((key, *read)), CONTENT | {*CAPTIONS}), row, name)
    return row.get(key)
