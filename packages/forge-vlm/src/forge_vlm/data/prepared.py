"""Samples that `prepare` wrote, memory-mapped.

prepared.json    options, counts, digests
tokens.bin ...   a value of each token, one sample after the other: ids (uint32), labels, branches (int32), weights (fp32)
samples.bin      int64 (samples, 3): the record, the first token after it, the first image after it
images.bin     int64 (images, FIELDS): 0 bytes or 1 a path; where these end in media.bin, and their number; the clip that
                 it is of in its sample; its layout
caps.bin         int64 (images, 2): the least and the most pixels of each that its record gives, 0 for none; there is no
                 such file where no record does
media.bin        encoded images or names of their files; no byte where an image is masked

All numbers are little-endian.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from forge_vlm._shared.paths import user_path
from forge_vlm._shared.problems import ProblemError, raise_problems
from forge_vlm.data.files import digest_of_file, invalid, readable
from forge_vlm.data.index import SampleIndex
from forge_vlm.data.options import problems
from forge_vlm.data.packing import IndexedSource
from forge_vlm.data.records import Caps, EncodedImage
from forge_vlm.data.sample import NEWER, MediaDecoder, Sample, identity_of, pictures_of
from forge_vlm.resolution import Layout
from forge_vlm.sequence.plan import IGNORE

__all__ = ["MANIFEST", "Prepared", "is_prepared", "prepared_options", "verify"]

MANIFEST = "prepared.json"
_KEYS = ("bytes", "sha256", "given", "options", "columns", "counts")
VERSION = 2  # of the files, and of what is read into them
OF_ROWS = (
    "positions",
    "pack",
    "group",
    "too_long",
    "image_masks",
)  # options that do not change samples
BYTES, NAMED = 0, 1
FIELDS = 4 + len(Layout._fields)  # of an image


def is_prepared(path: str | Path) -> bool:
    """Whether `prepare` wrote a folder."""
    with readable(path):
        return (user_path(path) / MANIFEST).is_file()


class Prepared(IndexedSource):
    """A folder that `prepare` wrote, as rows: `Prepared("talks-prepared", positions="mrope").stream(2048)`.

    Options are those with which it was prepared; positions, pack, group, too_long and image_masks may be others. Opening maps
    files, and reads the manifest and, for the fingerprint, `samples.bin`. Raises ValueError for another option, and
    InvalidSample for a file that is missing or has another size.
    """

    def __init__(self, path: str | Path, **options: Any) -> None:
        self.path, folder = str(path), user_path(path)
        self.about = about = _manifest(folder)
        for name, size in about["bytes"].items():
            found = (folder / name).stat().st_size if (folder / name).is_file() else None
            if found != size:
                rule = f"must have {size} bytes, and has {found}"
                raise invalid("", "truncated", ..., rule, "prepare it again", where=folder / name)

        self._given, given = options, _merged(about["given"], options, self.path)
        self._columns = {
            name: _mapped(folder / f"{name}.bin", dtype) for name, dtype in about["columns"].items()
        }
        ends = _mapped(folder / "samples.bin", "<i8").reshape(-1, 3)
        self._tokens, self._pictures = ends[:, 1], ends[:, 2]
        self._places = _mapped(folder / "pictures.bin", "<i8").reshape(-1, FIELDS)
        self._caps: np.ndarray | None = None

        if "caps.bin" in about["bytes"]:
            self._caps = _mapped(folder / "caps.bin", "<i8").reshape(-1, 2)
        self._media = folder / "media.bin"
        self.vocab_size, self.tokenizer = about["vocab_size"], about["tokenizer"]
        self.image_id = about["image_id"]
        lengths = np.diff(self._tokens, prepend=0)
        pictures = np.diff(self._pictures, prepend=0)
        sizes = [*(about[name] for name in SampleIndex._fields[4:8]), about.get("unread", {})]
        counted = SampleIndex(lengths, ends[:, 0], pictures, None, *sizes)
        decoder = MediaDecoder(
            pictures_of(given, given["image"]), given["corrupt"], given["image_masks"]
        )
        decoder.image_id = self.image_id
        own = identity_of({**about["options"], **{name: given[name] for name in OF_ROWS}})

        super().__init__(decoder, own, counted, about["content"])

    def sample(self, number: int) -> Sample:
        """A sample that rows name: arrays are views of the files."""
        first, stop = self._between(self._tokens, number)
        columns = {n: np.asarray(v[first:stop]) for n, v in self._columns.items()}
        places = range(*self._between(self._pictures, number))
        pictures = tuple(self._picture(place) for place in places)
        layouts = tuple(Layout(*map(int, self._places[place, 4:])) for place in places)
        each = [self.decoder.pictures.grids(layout) for layout in layouts]
        grids = tuple(grid for own in each for grid in own)
        clips = tuple(int(self._places[p, 3]) for p, own in zip(places, each) for _ in own)
        return Sample(**columns, pictures=pictures, layouts=layouts, grids=grids, clips=clips)

    def trained(self, left_out: np.ndarray) -> int | None:
        """As of any samples; reads the labels of those left out. None of a folder of an older version."""
        total, labels = self.about.get("trained"), self._columns["labels"]
        parts = (slice(*self._between(self._tokens, int(n))) for n in left_out)
        return total and total - sum(int((labels[part] != IGNORE).sum()) for part in parts)

    def name_of(self, number: int) -> str:
        """The folder and the record."""
        return f"{self.path}, record {int(self.kept[number])}"

    def _picture(self, place: int) -> EncodedImage:
        kind, end, size = map(int, self._places[place, :3])
        with self._media.open("rb") as file:
            file.seek(end - size)
            content = file.read(size)
        name = f"{self.path}, picture {place}"
        bounds = () if self._caps is None else self._caps[place].tolist()
        caps = Caps(*(bound or None for bound in bounds))
        return EncodedImage(name, content if kind == BYTES else Path(content.decode()), caps=caps)

    @staticmethod
    def _between(ends: np.ndarray, number: int) -> tuple[int, int]:
        return int(ends[number - 1]) if number else 0, int(ends[number])

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (
            self.path,
            self._given,
        )  # a worker maps the files, and gets no copy of them


def _reopened(path: str, options: dict[str, Any]) -> Prepared:
    return Prepared(path, **options)


def verify(path: str | Path) -> dict[str, Any]:
    """The manifest of a folder, all of whose files are read and have its digests; InvalidSample for one that has not."""
    path = user_path(path)
    about = _manifest(path)
    for name, wanted in about["sha256"].items():
        if digest_of_file(path / name).hex() != wanted:
            rule = "is damaged"
            raise invalid("", "damaged", ..., rule, "prepare it again", where=path / name)
    return about


def prepared_options(
    path: str | Path, given: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """(options of a folder, with others for rows; digests of its tokenizer and chat template by name).

    The tokenizer is named as when it was prepared or, where that was in another working directory, by its full path.
    """
    about = _manifest(Path(path))
    options = _merged(about["given"], given, str(path))
    if options["tokenizer"] != "byte" and not Path(options["tokenizer"]).exists():
        file = Path(about["tokenizer"]["path"])
        options["tokenizer"] = str(file.parent if options["template"] == "tokenizer" else file)
    # older folders end answers by other rules
    options["eos"] = about["tokenizer"].get("eos", options["eos"])
    names = ("tokenizer", "chat_template", "begin")
    return options, {name: about["options"][name] for name in names if name in about["options"]}


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        about: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        version = about["version"]
        _ = [about[key] for key in _KEYS if version == VERSION]
    except (OSError, ValueError, KeyError, TypeError) as error:
        rule, where = f"must be that of a prepared folder ({error})", folder / MANIFEST
        raise invalid("", "not_json", ..., rule, "prepare it again", where=where) from error
    if version != VERSION:
        rule = f"must be {VERSION}"
        raise invalid("version", "version", version, rule, "prepare it again", where=folder)
    # questions are written as the samples were: a folder of before samples began as the tokenizer says has no bos
    spec, given = about.get("tokenizer") or {}, about.get("given") or {}
    if given.get("bos", "") is None and spec.get("name") == "json" and not spec.get("bos"):
        given["bos"] = "none"
    return about


def _merged(prepared: Mapping[str, Any], given: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The options of a folder with others for rows; ValueError for what would change its samples."""
    prepared = {**NEWER, **prepared}  # of an older folder
    found = dict(prepared)
    for name, value in given.items():
        if name in OF_ROWS:
            found[name] = value
        elif name not in prepared:
            rule = "is not an option of a prepared folder"
            fix = "remove it"
            raise invalid(name, "unknown_key", value, rule, fix, where=path, kind=ProblemError)
        elif json.loads(json.dumps(value)) != prepared[name]:
            rule = f"must be {prepared[name]!r:.80}, with which it was prepared"
            fix = "remove it, or prepare again"
            raise invalid(name, "mismatch", value, rule, fix, where=path, kind=ProblemError)
    raise_problems("source", problems(found))
    return found


def _mapped(path: Path, dtype: str) -> np.ndarray:
    """The numbers of a file; an empty one cannot be mapped."""
    if not path.stat().st_size:
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, mode="r")
