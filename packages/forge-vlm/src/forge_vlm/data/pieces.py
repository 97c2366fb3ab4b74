"""Large files in pieces that are indexed one by one: tar files of WebDataset, ranges of lines of JSON."""

from __future__ import annotations

import hashlib
from pathlib import Path

from forge_vlm._shared.paths import files_named, user_path
from forge_vlm._shared.record_keys import RecordKeys
from forge_vlm.data.errors import invalid, readable
from forge_vlm.data.files import folder_of, opened
from forge_vlm.data.formats import lines_of, open_records
from forge_vlm.data.records import Records

__all__ = ["STREAMED", "Pieces"]

STREAMED = ("chat", "llava", "webdataset")
_LEAST, _MOST = 1 << 12, 1 << 26  # bytes of a range of lines
_ENDS = 1 << 16  # bytes at the start and the end of a file that its digest covers
_RANGES = 4  # of a shard, so that shards have about as many lines


class Pieces:
    """The pieces of a file, or of the files in a folder: each `.tar` is one, and lines of `.jsonl` are cut by bytes.

    Opening reads names, sizes, and the ends of files for the digest. `open(piece)` reads an index of one: headers of a tar,
    ends of lines. Raises InvalidSample where there are none.
    """

    def __init__(
        self,
        format: str,
        path: str | Path,
        virtual_shards: int,
        keys: RecordKeys | None = None,
        images: str | None = None,
    ) -> None:
        self.format, path, self._keys = format, user_path(path), keys
        self._images = folder_of(images)
        ending = ".tar" if format == "webdataset" else ".jsonl"
        with readable(path):
            if not path.exists():
                rule = "to stream from must exist"
                raise invalid("path", "not_found", str(path), rule, "check it")
            files = files_named(path, suffix=ending) if path.is_dir() else [path]
        if not files or any(file.suffix != ending for file in files):
            rule = f"must be a {ending} file, or a folder of them, to be streamed as {format!r}"
            raise invalid("path", "format", str(path), rule, "convert it, or prepare it")
        self.files = files
        with readable(path):
            sizes = [file.stat().st_size for file in files]
        each = min(_MOST, max(_LEAST, -(-sum(sizes) // (virtual_shards * _RANGES))))
        self._pieces: list[tuple[Path, int, int]] = []  # file, first byte, byte behind the last
        for file, size in zip(files, sizes):
            step = size if format == "webdataset" else each
            self._pieces += [
                (file, at, min(size, at + step)) for at in range(0, size, max(1, step))
            ]
        empty_tar = format == "webdataset" and 0 in sizes  # a whole one ends with zeros
        if not self._pieces or empty_tar:
            rule = f"must hold records, and {'a file of it is' if empty_tar else 'its files are'} empty"
            raise invalid("path", "empty", str(path), rule, "check the path")
        self._digest = _digest(files)

    def __len__(self) -> int:
        return len(self._pieces)

    def open(self, piece: int) -> Records:
        """The records of a piece."""
        file, start, stop = self._pieces[piece]
        if self.format == "webdataset":
            return open_records(self.format, file, keys=self._keys, images=self._images)
        return lines_of(self.format, file, start, stop, self._keys, self._images)

    def fingerprint(self) -> dict[str, str | int]:
        """What identifies the files, and how they are cut."""
        return {"content": self._digest, "pieces": len(self)}


def _digest(files: list[Path]) -> str:
    """Of names, sizes and ends of files."""
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with opened(path) as file:
            digest.update(file.read(_ENDS))
            file.seek(max(0, size - _ENDS))
            digest.update(file.read(_ENDS))
    return digest.hexdigest()
