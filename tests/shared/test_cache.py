"""The shared topic `cache`, by the copy of one package; the writers are real processes and threads."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forge_data import InvalidData
from forge_data._shared import cache, locks
from forge_data._shared.atomic import new_folder, write_file
from forge_data._shared.cache import digest_of, entry_of, once
from forge_testing.problems import rejects
from forge_testing.processes import exit_code, forked

pytestmark = pytest.mark.lane("test")


def words(entry: Path, write: Callable[[], object] | None = None) -> str:
    """The content of an entry, a file that must begin with `w`."""

    def read() -> str:
        if not (text := entry.read_text()).startswith("w"):
            raise ValueError(text)
        return text

    write = write or (lambda: write_file(entry, "words"))
    return once(entry, read, write, what="the words", kind=InvalidData)


def wait_for(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_of_many_processes_one_writes_and_the_others_name_it_while_they_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def slow() -> None:
        with open("writers", "a") as log:
            log.write(f"{os.getpid()} ")
        wait_for(Path("may_end").exists)
        write_file(tmp_path / "cache/e", "words")

    def run() -> None:
        with Path(f"{os.getpid()}.err").open("w") as sys.stderr:
            words(tmp_path / "cache/e", slow)

    pids = [forked(run) for _ in range(4)]

    def waiting() -> list[str]:
        said = [path.read_text() for path in tmp_path.glob("*.err")]
        return [line for line in said if line.endswith("\n")]

    wait_for(lambda: len(waiting()) == 3)
    (writer,) = Path("writers").read_text().split()
    # one that comes in the instant between lock and name knows no name
    names = (f"waiting for pid {writer} on ", "waiting for another process,")
    for line in waiting():
        assert any(name in line for name in names)
        assert f" the words in {tmp_path / 'cache/e'}" in line
    Path("may_end").touch()
    assert [exit_code(pid) for pid in pids] == [0] * 4
    assert Path("writers").read_text().split() == [writer]


def test_F172_of_two_threads_one_writes(tmp_path: Path) -> None:
    wrote = []

    def slow() -> None:
        wrote.append(1)
        time.sleep(0.05)
        write_file(tmp_path / "e", "words")

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: words(tmp_path / "e", slow), range(2)))
    assert (found, wrote) == (["words"] * 2, [1])


def test_a_killed_writer_neither_blocks_nor_leaves_an_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed with all its files written but not yet in place, and with a child that outlives it."""
    monkeypatch.chdir(tmp_path)
    entry = tmp_path / "cache/e"

    def killed() -> None:
        with new_folder(entry) as folder:
            (folder / "half").touch()
            Path("child").write_text(str(forked(lambda: time.sleep(60))))
            os.kill(os.getpid(), signal.SIGKILL)

    assert exit_code(forked(lambda: words(entry, killed))) == -signal.SIGKILL
    try:
        assert len(os.listdir("cache")) == 2  # the lock and half an entry
        assert words(entry) == "words"
    finally:
        os.kill(int(Path("child").read_text()), signal.SIGKILL)
    assert sorted(os.listdir("cache")) == ["e", "e.lock"]


def test_an_entry_is_written_once_and_read_without_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert words(tmp_path / "cache/e") == "words"
    monkeypatch.setattr(cache, "locked", None)
    assert words(tmp_path / "cache/e", write=lambda: 1 / 0) == "words"


@pytest.mark.parametrize("kind", [ValueError, KeyError, TypeError, FileNotFoundError, InvalidData])
def test_a_damaged_entry_is_made_again_and_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: type[Exception]
) -> None:
    entry = tmp_path / "cache/e"

    def read() -> str:
        if "damaged" in os.listdir(entry):
            raise kind("like this")
        return "good"

    def write() -> None:
        with new_folder(entry) as folder:
            (folder / "a").touch()

    (entry / "damaged").mkdir(parents=True)
    (tmp_path / "cache/.e.tmp-elsewhere-1-0123abcd").mkdir()  # of a dead writer: the lock is free
    assert once(entry, read, write, what="it") == "good"
    (line,) = capsys.readouterr().err.splitlines()
    assert str(entry) in line
    assert "like this" in line
    assert sorted(os.listdir(tmp_path / "cache")) == ["e", "e.lock"]


def test_a_full_disk_and_a_folder_that_cannot_be_written_name_the_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()

    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for entry, code, kind in (("e", "full", InvalidData), ("file/e", "unwritable", ValueError)):
        folder = (tmp_path / entry).parent
        with rejects("cache", str(folder), code, kind, where="FORGE_CACHE") as error:
            words(tmp_path / entry, full)
        assert isinstance(error.value, InvalidData) == (kind is InvalidData)
        found = once(tmp_path / entry, dict, full, what="the words", without=lambda: "alone")
        assert found == "alone"
        (line,) = capsys.readouterr().err.splitlines()
        assert f" {str(folder)!r} " in line

    def others() -> None:
        raise PermissionError(errno.EACCES, "no", "/somewhere/else.txt")

    with pytest.raises(PermissionError, match=r"else\.txt"):
        words(tmp_path / "e", others)


def test_entries_of_before_0_2_are_used_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FORGE_CACHE", raising=False)
    root = tmp_path / ".cache/forge"
    assert entry_of("lengths", "e") == root / "lengths/e"
    (root / "tokens/e").mkdir(parents=True)  # of lengths, by default
    assert entry_of("lengths", "e") == entry_of("tokens", "e") == root / "tokens/e"
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "x"))
    assert entry_of("tokens", "e") == tmp_path / "x/tokens/e"
    (tmp_path / "x/e").mkdir(parents=True)
    for kind in ("tokens", "lengths"):
        assert entry_of(kind, "e") == tmp_path / "x/e"
    assert entry_of("plans", "e", "~/mine") == tmp_path / "mine/e"


def test_a_digest_is_of_the_content_in_any_order() -> None:
    one = digest_of({"a": 1, "b": ["\udcff", None]})
    assert len(one) == 32
    assert one == digest_of({"b": ["\udcff", None], "a": 1}) != digest_of({"a": 1, "b": [None]})


def test_F163_without_locks_writers_that_meet_all_get_the_entry(tmp_path: Path) -> None:
    entry = tmp_path / "cache/e"

    def run() -> None:
        def no_lock(*_: object) -> None:
            raise OSError(errno.ENOSYS, "no locks")

        def slow() -> None:
            with new_folder(entry) as folder:
                (folder / "a").write_text("words")
                (tmp_path / str(os.getpid())).touch()
                wait_for(lambda: len([p for p in tmp_path.iterdir() if p.name.isdigit()]) == 3)

        locks.fcntl.flock = no_lock
        read = lambda: (entry / "a").read_text()  # noqa: E731
        assert once(entry, read, slow, what="the words") == "words"

    pids = [forked(run) for _ in range(3)]
    assert [exit_code(pid) for pid in pids] == [0] * 3
