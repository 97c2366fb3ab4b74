"""The shared topic `hashed_files`, by the copy of one package."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from forge_data._shared.hashed_files import HashedFile

pytestmark = pytest.mark.lane("test")


def test_the_digest_is_that_of_a_file_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, synced = tmp_path / "a.bin", []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(path.read_bytes()) or real(fd))
    file = HashedFile(path)
    file.write(b"abc")
    file.write(memoryview(b"def"))
    assert file.finish() == hashlib.sha256(b"abcdef").hexdigest()
    assert synced == [b"abcdef"]
    assert file.size == 6
    with pytest.raises(FileExistsError, match=r"a\.bin"):
        HashedFile(path)
