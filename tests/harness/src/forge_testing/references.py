"""Results that many tests compare with, computed once for a test session and shared by its workers.

The root conftest.py makes one folder for a session and passes it on in FORGE_TEST_SESSION. An entry is found by
what it was made of and by a digest of all source files: a mistake that somebody plants between two calls is compared
with a reference that was made with the mistake, never with an older one. Without the variable nothing is kept.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
SESSION = "FORGE_TEST_SESSION"
_ROOT = Path(__file__).resolve().parents[4]
_SOURCES = ("packages/*/src", "apps/*/src", "tests/harness/src")


@functools.cache
def digest_of_sources() -> str:
    """Digest of every Python file that a reference may have been computed with; about 0.1 s, once a process."""
    found = hashlib.sha256()
    for pattern in _SOURCES:
        for file in sorted(_ROOT.glob(f"{pattern}/**/*.py")):
            found.update(str(file).encode() + b"\0" + file.read_bytes())
    return found.hexdigest()


def once(key: Any, make: Callable[[Path], T], folder: Path | None = None) -> T:
    """The result of `make(folder)`, computed once for the session by the first worker that asks; others wait.

    key: whatever the result depends on, as JSON; the digest of the sources is added.
    make: computes the result, which is pickled, and may leave files in the folder that it gets.
    folder: receives a copy of these files. What a caller changes in its copies changes no other caller's.
    """
    session = os.environ.get(SESSION)
    if session is None:
        with tempfile.TemporaryDirectory() as scratch:
            return _copied(Path(scratch), make(Path(scratch)), folder)
    text = json.dumps([key, digest_of_sources()], sort_keys=True, default=repr)
    entry = Path(session) / hashlib.sha256(text.encode()).hexdigest()[:32]
    with open(f"{entry}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (entry / "result").exists():
            shutil.rmtree(entry, ignore_errors=True)  # of a maker that failed
            (entry / "files").mkdir(parents=True)
            result = make(entry / "files")
            (entry / "new").write_bytes(pickle.dumps(result))
            (entry / "new").rename(entry / "result")
    return _copied(entry / "files", pickle.loads((entry / "result").read_bytes()), folder)


def _copied(files: Path, result: T, folder: Path | None) -> T:
    if folder is not None:
        shutil.copytree(files, folder, dirs_exist_ok=True)
    return result
