"""Files of a source (open, list, digest), and the error that names a sample or file that cannot be read."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from functools import partial
from io import BufferedReader
from pathlib import Path

from forge_vlm._shared import problems
from forge_vlm._shared.atomic import write_file
from forge_vlm._shared.cache import digest_of, entry_of, once
from forge_vlm._shared.paths import files_named, open_regular, read_regular, user_path

__all__ = [
    "InvalidSample",
    "check_tar_end",
    "content_of",
    "digest_of_file",
    "digest_of_files",
    "files_of",
    "folder_of",
    "invalid",
    "opened",
    "readable",
]


class InvalidSample(problems.WithProblems, ValueError):
    """A sample, an image or a file that cannot be read; `where` names it."""


#: The InvalidSample of one problem, or, with `kind`, another error.
invalid = partial(problems.invalid, kind=InvalidSample)


@contextlib.contextmanager
def readable(path: object) -> Iterator[None]:
    """Errors of the file system as InvalidSample with the name of the file, or `path`."""
    try:
        yield
    except OSError as error:
        rule, where = f"cannot be read ({error.strerror})", error.filename or path
        fix = "check the path and its permissions"
        raise invalid("", "unreadable", ..., rule, fix, where=where) from error


_SMALL = 1 << 24  # bytes of files that are sooner hashed than looked up


def opened(path: Path) -> BufferedReader:
    """A regular file, to be read; InvalidSample for another."""
    with readable(path):
        return open(open_regular(path, InvalidSample)[0], "rb")


def files_of(path: Path, ending: str) -> list[Path]:
    """A file, or the files of a folder with an ending."""
    files = files_named(path, suffix=f".{ending}") if path.is_dir() else [path]
    if not files or not files[0].exists():
        rule = f"must be a .{ending} file or a folder of them"
        raise invalid("", f"no_{ending}", ..., rule, "check the path", where=path)
    return files


def digest_of_file(path: Path) -> bytes:
    """SHA-256 of the content."""
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").digest()


def digest_of_files(files: Sequence[Path], cache: str | None = None) -> str:
    """SHA-256 of the SHA-256 of each file. Of large files it is kept in `cache` by their sizes and times of change, so that
    one process of a run reads them once, not each rank at each start."""

    def made() -> str:
        return hashlib.sha256(b"".join(map(digest_of_file, files))).hexdigest()

    def read() -> str:
        digest = read_regular(entry, 64).decode()
        if len(bytes.fromhex(digest)) != 32:
            raise invalid("", "digest", digest, "must be 64 hex digits", where=entry)
        return digest

    with readable(files[0].parent if files else ""):
        found = [(str(file.absolute()), os.stat(file)) for file in files]
    if sum(state.st_size for _, state in found) <= _SMALL:
        return made()
    states = [(p, state.st_size, state.st_mtime_ns, state.st_ctime_ns) for p, state in found]
    entry = entry_of("digests", f"vlm-files-{digest_of({'files': states})}", cache)
    what = f"digest of {files[0].parent}"
    return once(entry, read, lambda: write_file(entry, made()), what=what, without=made)


def content_of(path: Path) -> bytes:
    """All bytes of a file."""
    with opened(path) as file:
        return file.read()


def check_tar_end(content: BufferedReader, stop: int, path: Path) -> None:
    """InvalidSample unless a tar whose members end at byte `stop` has a block of zeros there, and nothing else: tarfile
    takes a damaged header, a second archive and the end of the file between two members for the end."""
    content.seek(stop)
    zeros = 0
    while chunk := content.read(1 << 20):
        if chunk.count(0) < len(chunk):
            zeros = 0
            break
        zeros += len(chunk)
    if zeros < 512:
        rule = f"must end with zeros at byte {stop}: it was truncated, a header is damaged, or another tar follows"
        raise invalid("", "bad_tar", ..., rule, "restore it, or divide it", where=path)


def folder_of(images: str | Path | None) -> Path | None:
    """The folder of the option `images`; InvalidSample where it is not there."""
    folder = None if images is None else user_path(images).absolute()
    if folder is not None and not folder.is_dir():
        raise invalid("images", "not_folder", str(images), "must be a folder", "check the path")
    return folder
