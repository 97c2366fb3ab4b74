"""Files of each format as indexed records.

`open_records(name, path)` reads an index (lines, members, table rows), not the images.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from forge_vlm._shared.paths import user_path
from forge_vlm._shared.record_keys import RecordKeys
from forge_vlm.data.conversations import from_chat, from_llava
from forge_vlm.data.files import InvalidSample, folder_of, invalid, readable
from forge_vlm.data.formats.json_files import (
    JsonLines,
    open_chat,
    open_coco,
    open_image_folder,
    open_llava,
    open_video_folder,
)
from forge_vlm.data.formats.tables import TarSamples, open_parquet, open_saved_set
from forge_vlm.data.records import Records

__all__ = [
    "FORMATS",
    "lines_of",
    "open_records",
]

FORMATS: dict[str, Callable[..., Records]] = {
    "chat": open_chat,
    "llava": open_llava,
    "coco": open_coco,
    "coco_trees": partial(open_coco, together=True),
    "folder": open_image_folder,
    "videos": open_video_folder,
    "parquet": open_parquet,
    "dataset": open_saved_set,
    "webdataset": TarSamples,
}


def lines_of(
    name: str, path: Path, start: int, stop: int, keys: RecordKeys | None, images: Path | None
) -> Records:
    """The records of lines that begin in a range of bytes of a file of chat or LLaVA's lines."""
    make = {"chat": from_chat, "llava": from_llava}[name]
    return JsonLines(path, partial(make, keys=keys), images, start, stop)


_ASKING = ("chat", "llava")  # formats whose records may be questions only


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
