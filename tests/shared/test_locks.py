"""The shared topic `locks`, by the copy of one package; real processes and threads hold the locks."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from forge_data._shared.locks import Held, Lock, holder, locked
from forge_testing.processes import exit_code, forked

pytestmark = pytest.mark.lane("test")


def start(work: Callable[[], object]) -> int:
    """A forked process that has done its work, and then sleeps until it is killed."""
    ready, told = os.pipe()
    pid = forked(lambda: (work(), os.write(told, b"x"), time.sleep(60)))
    os.close(told)
    assert os.read(ready, 1) == b"x"
    os.close(ready)
    return pid


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    exit_code(pid)


def test_a_holder_is_named_and_the_lock_of_a_dead_one_is_free(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert holder(path) is None
    other = start(lambda: Lock(path))
    with pytest.raises(Held, match=str(path)) as error:
        Lock(path)
    assert error.value.owner == holder(path)
    assert error.value.owner.startswith(f"pid {other} on {os.uname().nodename} since 2")
    kill(other)
    assert holder(path) is None
    with locked(path):
        assert f"pid {os.getpid()} " in str(holder(path))
    assert holder(path) is None
    assert path.exists()


def test_F172_threads_exclude_each_other_and_a_waiter_names_the_holder(tmp_path: Path) -> None:
    waited: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        with locked(tmp_path / "lock"):
            with pytest.raises(Held):
                pool.submit(Lock, tmp_path / "lock").result()
            found = pool.submit(Lock, tmp_path / "lock", wait=waited.append)
            while not waited:
                time.sleep(0.001)
            assert not found.done()
        assert found.result(20).held
        found.result().release()
    assert [line.partition(" on ")[0] for line in waited] == [f"pid {os.getpid()}"]


def test_a_lock_is_shared_with_those_that_share_it(tmp_path: Path) -> None:
    one, two = (Lock(tmp_path / "lock", shared=True) for _ in range(2))
    one.release()
    with pytest.raises(Held):
        Lock(tmp_path / "lock")
    two.release()
    with locked(tmp_path / "lock"), pytest.raises(Held):
        Lock(tmp_path / "lock", shared=True)


@pytest.mark.parametrize("wait", [False, True])
def test_a_forked_child_does_not_keep_a_lock(tmp_path: Path, wait: bool) -> None:
    """Also not one for which a thread of its parent waited when it was forked."""
    waited: list[str] = []
    first = Lock(tmp_path / "lock")
    with ThreadPoolExecutor(1) as pool:
        if wait:
            second = pool.submit(Lock, tmp_path / "lock", wait=waited.append)
            while not waited:
                time.sleep(0.001)
        child = start(lambda: None)
        first.release()
        if wait:
            second.result(20).release()
    try:
        Lock(tmp_path / "lock").release()
    finally:
        kill(child)


@pytest.mark.parametrize("again", [False, True])
def test_F162_a_file_that_was_replaced_before_it_was_locked_is_not_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    path, flock = tmp_path / "lock", fcntl.flock

    def late(*arguments: Any) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        path.unlink()
        if again:
            path.touch()
        flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", late)
    with locked(path) as lock:
        assert lock.is_current()
        assert f"pid {os.getpid()} " in str(holder(path))
        path.unlink()
        assert not lock.is_current()


def test_F162_a_waiter_for_a_removed_lock_takes_that_of_a_new_file(tmp_path: Path) -> None:
    waited: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        with locked(tmp_path / "lock", remove=True):
            found = pool.submit(Lock, tmp_path / "lock", wait=waited.append)
            while not waited:
                time.sleep(0.001)
        lock = found.result(20)
    assert lock.is_current()
    lock.release()
    with locked(tmp_path / "lock", remove=True):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL])
def test_F163_a_file_system_without_locks_is_warned_of_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    for name in ("a", "b"):
        with locked(tmp_path / name) as one, locked(tmp_path / name, wait=print) as other:
            assert (one.held, other.held) == (False, False)
    assert holder(tmp_path / "a") is None
    assert [r.getMessage().partition(":")[0] for r in caplog.records] == [str(tmp_path)]


def test_a_fifo_or_a_link_is_no_lock(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("lock")
    for name in ("fifo", "link"):
        with pytest.raises(OSError, match=name):
            Lock(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="none/lock"):
        Lock(tmp_path / "none/lock")


def test_a_child_that_leaves_the_block_does_not_remove_the_lock(tmp_path: Path) -> None:
    block = locked(tmp_path / "lock", remove=True)
    block.__enter__()
    assert exit_code(forked(lambda: block.__exit__(None, None, None))) == 0
    assert (tmp_path / "lock").exists()
    block.__exit__(None, None, None)
    assert not (tmp_path / "lock").exists()
