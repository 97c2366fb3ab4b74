"""Records of parquet files, of saved sets of `datasets`, and of WebDataset tars."""

from __future__ import annotations

import glob
import os
import re
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_vlm._shared.jsonl import parse
from forge_vlm._shared.problems import ProblemError
from forge_vlm._shared.record_keys import Keys, RecordKeys, is_empty
from forge_vlm._shared.table_files import check_parquet, check_saved_set
from forge_vlm.data.conversations import index_of
from forge_vlm.data.files import (
    InvalidSample,
    check_tar_end,
    digest_of_files,
    files_of,
    invalid,
    opened,
)
from forge_vlm.data.formats.json_files import CAPTIONS, MESSAGES, caption_of
from forge_vlm.data.records import (
    EncodedImage,
    Record,
    Records,
    Span,
    captioned,
    interleaved,
    picture_of,
)

_PICTURES = ("jpg", "jpeg", "png", "webp", "bmp", "gif")
#: Endings of members of a tar that hold what a sample could learn, next to the images that are read.
_MEMBERS = frozenset(("avi", "avif", "flac", "jp2", "m4a", "mkv", "mov", "mp3", "mp4", "ogg", "ppm", "tif", "tiff", "wav", "webm"))  # fmt: skip


def open_parquet(path: Path, keys: RecordKeys, images: Path | None) -> Records:
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
        return TableRows(sets.concatenate_datasets(each), path, files, keys, images)
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


def open_saved_set(path: Path, keys: RecordKeys, images: Path | None) -> Records:
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
    return TableRows(found, path, files, keys, images)


class TableRows:
    """Rows of a set whose columns are those of a sample."""

    def __init__(
        self, rows: Any, path: Path, files: list[Path], keys: RecordKeys, images: Path | None
    ) -> None:
        from datasets import Image, List

        self._path, self._files, self._keys = path, files, keys
        self._folder = images or (path if path.is_dir() else path.parent)
        names = rows.column_names
        self._text = next((n for n in (*MESSAGES, *CAPTIONS) if n in names), None)
        columns = [n for n in ("image", "images") if n in names]
        if self._text is None or (not columns and self._text not in MESSAGES):
            wanted = ", ".join((*MESSAGES, *CAPTIONS))
            rule = f"must have image (or images) and one of {wanted}"
            raise invalid("columns", "missing", names, rule, "rename them", where=path)

        for name in columns:  # images stay as they are encoded
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
        if self._text in MESSAGES:
            return MESSAGES[self._text](name, row, folder, keys=self._keys)
        image = "image" if not is_empty(row.get("image")) else "images"
        pictures = [picture_of(name, each, folder) for each in _listed(row.get(image))]
        return captioned(name, caption_of(name, row, self._keys, image), pictures)

    def fingerprint(self, cache: str | None = None) -> str:
        return digest_of_files(self._files, cache)


class TarSamples:
    """Samples of WebDataset: members of one stem, an image or several (`a.0.png`), and `.txt` or `.json` (messages,
    conversations, a caption, or `texts` with null where an image stands). Its images are in the order of their names, or
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
            if not stem:  # "._a.png", which tar of macOS writes next to "a.png"
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
            EncodedImage(f"{name}.{ending}", members[ending])
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
        layout = next((key for key in MESSAGES if key in given), None)
        if layout is not None:
            given["images"] = [{"bytes": p.content, "path": p.name} for p in pictures]
            return MESSAGES[layout](name, given, self._folder, keys=self._keys)

        if "texts" in given:
            self._keys.check(Keys(frozenset(("texts",))), given, name)
            return interleaved(name, given["texts"], pictures)
        return captioned(name, caption_of(name, given, self._keys), pictures)

    def _in_order(
        self, name: str, value: dict[str, Any], pictures: list[EncodedImage]
    ) -> list[EncodedImage]:
        """Images in the order in which the JSON names them under `image` or `images`, which are taken out of it."""
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
        return EncodedImage(name, member).read()

    def fingerprint(self, cache: str | None = None) -> str:
        return digest_of_files(self._files, cache)


def _name_of(name: str, each: Any, pictures: list[EncodedImage]) -> str:
    """The name of the image that an entry of `images` means: its name, `{"path": name}`, or its number from 0."""
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
