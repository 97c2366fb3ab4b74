"""Digests of large files are made once and kept by size and times of change."""

import hashlib
import os
import time

import pytest

from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

pytest.importorskip("numpy")
pytest.importorskip("PIL")

from data_files import OPTIONS, dataset, parquet, webdataset  # noqa: E402

from forge_vlm.data import InvalidSample, VisionChatSource  # noqa: E402
from forge_vlm.data import files as files_module  # noqa: E402
from forge_vlm.data.files import digest_of_files  # noqa: E402
from forge_vlm.data.formats import open_records  # noqa: E402

WRITERS = {
    "parquet": (parquet, "*.parquet"),
    "dataset": (dataset, "*.arrow"),
    "webdataset": (webdataset, "*.tar"),
}


@pytest.fixture
def hashed(monkeypatch):
    """The files that were read for a digest."""
    names, real = [], files_module.digest_of_file
    monkeypatch.setattr(files_module, "digest_of_file", lambda f: names.append(f.name) or real(f))
    monkeypatch.setattr(files_module, "_SMALL", 0)
    return names


@pytest.mark.parametrize("format", WRITERS)
def test_F166_files_are_read_once_for_their_digest(format, tmp_path, hashed):
    writer, pattern = WRITERS[format]
    path, cache = writer(tmp_path / "a"), str(tmp_path / "cache")
    files = sorted(path.glob(pattern))
    each = b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)
    for _ in range(2):
        source = VisionChatSource(path, format=format, cache=cache, **OPTIONS)
        assert source.content == hashlib.sha256(each).hexdigest()
    assert hashed == [file.name for file in files]

    os.utime(files[0], (1, 1))
    assert VisionChatSource(path, format=format, cache=cache, **OPTIONS).content == source.content
    assert len(hashed) == 2 * len(files)
    open_records(format, path)  # as each worker of prepare does
    assert len(hashed) == 2 * len(files)


def test_F166_other_content_of_one_size_and_time_is_read(tmp_path, hashed):
    file, cache = tmp_path / "a.tar", str(tmp_path / "cache")
    digests = []
    for content in (b"a" * 9, b"b" * 9):
        file.write_bytes(content)
        os.utime(file, (1, 1))
        digests.append(digest_of_files([file], cache))
        time.sleep(0.02)  # the time of a change of the inode
    assert digests[0] != digests[1]


def test_F166_a_kept_digest_that_is_damaged_is_made_again(tmp_path, hashed, capfd):
    file, cache = tmp_path / "a.tar", tmp_path / "cache"
    file.write_bytes(b"a")
    wanted = digest_of_files([file], str(cache))
    (entry,) = cache.glob("vlm-files-????????????????????????????????")
    for damage in (b"", b"00", b"\xff" * 64, b"z" * 64):
        entry.write_bytes(damage)
        assert digest_of_files([file], str(cache)) == wanted
    assert len(hashed) == 5
    closed = tmp_path / "file"
    closed.write_text("")
    assert digest_of_files([file], str(closed)) == wanted
    assert str(closed) in capfd.readouterr().err
    with rejects("", ..., "unreadable", InvalidSample, where="b.tar"):
        digest_of_files([tmp_path / "b.tar"], str(cache))


def test_F166_small_files_are_not_kept(tmp_path):
    file = tmp_path / "a.tar"
    file.write_bytes(b"a")
    digest_of_files([file], str(tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()


@pytest.mark.lane("quick")
def test_F166_of_several_processes_one_reads_the_files(tmp_path, monkeypatch):
    file, counts = tmp_path / "a.tar", tmp_path / "counts"
    file.write_bytes(b"a" * 100)
    real = files_module.digest_of_file

    def slow(path):
        with counts.open("a") as opened:
            opened.write("x")
        time.sleep(0.2)
        return real(path)

    monkeypatch.setattr(files_module, "digest_of_file", slow)
    monkeypatch.setattr(files_module, "_SMALL", 0)
    wanted = hashlib.sha256(hashlib.sha256(b"a" * 100).digest()).hexdigest()
    pids = []
    for _ in range(3):
        pids.append(os.fork())
        if not pids[-1]:
            try:
                os._exit(digest_of_files([file], str(tmp_path / "cache")) != wanted)
            finally:
                os._exit(1)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * 3
    assert counts.read_text() == "x"
