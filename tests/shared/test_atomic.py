"""The shared topic `atomic`, by the copy of one package; real kills and a real limit of the size of a file."""

from __future__ import annotations

import errno
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from forge_data._shared import atomic
from forge_data._shared.atomic import (
    install_folder,
    new_file,
    new_folder,
    remove,
    restore_folder,
    write_file,
)
from forge_data._shared.problems import invalid
from forge_testing.durability import synced_renames
from forge_testing.problems import rejects
from forge_testing.processes import exit_code, forked

pytestmark = pytest.mark.lane("test")
HOST = atomic._host()


def tree(folder: Path) -> dict[str, str]:
    """Contents by name, of hidden files and of empty folders too."""
    return {
        str(p.relative_to(folder)): p.read_text() if p.is_file() else ""
        for p in folder.rglob("*")
        if p.is_file() or not any(p.iterdir())
    }


def make(target: Path, text: str, replace: bool = True) -> None:
    with new_folder(target, replace=replace) as folder:
        (folder / "below").mkdir()
        for name in ("a", "below/b"):
            with (folder / name).open("w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())


def test_files_and_names_are_on_the_disk_before_they_are_published(tmp_path: Path) -> None:
    with synced_renames() as moved:
        write_file(tmp_path / "file", "é")
        write_file(tmp_path / "file", "2")
        make(tmp_path / "out", "1")
        make(tmp_path / "out", "2")
    assert moved[:-1] == ["file", "file", "out", ".out.old", "out"]
    assert moved[-1].startswith("..out.old.tmp-")
    assert tree(tmp_path) == {"file": "2", "out/a": "2", "out/below/b": "2"}


def test_what_raises_leaves_what_was_there(tmp_path: Path) -> None:
    write_file(tmp_path / "file", "1")
    make(tmp_path / "out", "1")
    before = tree(tmp_path)
    with rejects("a", 1, "b"), new_file(tmp_path / "file") as file:
        file.write(b"half")
        raise invalid("a", "b", 1, "is made up")
    with pytest.raises(TypeError):  # prose: Python's own
        make(tmp_path / "out", 2)  # type: ignore[arg-type]
    with pytest.raises(OSError, match=str(errno.ENOTEMPTY)):
        make(tmp_path / "out", "2", replace=False)
    assert tree(tmp_path) == before


def test_a_rename_that_fails_gives_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "out", "1")
    before, rename = tree(tmp_path), os.rename

    def failing(source: Path, target: Path) -> None:
        if ".tmp-" in Path(source).name and Path(target).name == "out":
            raise OSError(errno.EIO, "no")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OSError, match=str(errno.EIO)):
        make(tmp_path / "out", "2")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("call", range(1, 10))
def test_a_replacement_that_is_killed_anywhere_is_undone_or_done_by_the_next_writer(
    tmp_path: Path, call: int
) -> None:
    """Killed before the call-th change of the disk of `install_folder`; the next writer restores, or writes anew."""
    make(tmp_path / "out", "1")
    (tmp_path / "whole").mkdir()
    write_file(tmp_path / "whole/a", "2")
    left = [call]

    def dying(change: Any) -> Any:
        def changed(*arguments: Any, **options: Any) -> None:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            change(*arguments, **options)

        return changed

    def killed() -> None:
        for name in ("rename", "fsync", "rmdir", "unlink"):
            setattr(os, name, dying(getattr(os, name)))
        install_folder(tmp_path / "whole", tmp_path / "out", replace=True)

    assert exit_code(forked(killed)) in (-signal.SIGKILL, 0)
    restore_folder(tmp_path / "out")
    found = tree(tmp_path / "out")
    assert found in ({"a": "1", "below/b": "1"}, {"a": "2"})
    assert (tmp_path / "whole").exists() == (found["a"] == "1")
    atomic._seen.clear()  # the next writer is another process
    make(tmp_path / "out", "3")
    assert tree(tmp_path / "out") == {"a": "3", "below/b": "3"}
    remove(tmp_path / "whole")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_kill_between_the_two_renames_is_restored_by_the_next_writer(tmp_path: Path) -> None:
    make(tmp_path / "out", "1")

    def killed() -> None:
        rename = os.rename

        def second(source: Path, target: Path) -> None:
            if Path(target).name == "out":
                os.kill(os.getpid(), signal.SIGKILL)
            rename(source, target)

        os.rename = second  # type: ignore[assignment]
        make(tmp_path / "out", "2")

    assert exit_code(forked(killed)) == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    with pytest.raises(OSError, match=str(errno.ENOTEMPTY)):
        make(tmp_path / "out", "3", replace=False)
    assert tree(tmp_path / "out") == {"a": "1", "below/b": "1"}
    assert not (tmp_path / ".out.old").exists()


@pytest.mark.parametrize("name", ["out", "data[v2]", "a*b"])
def test_F149_leftovers_of_dead_writers_are_removed_and_of_running_ones_kept(
    tmp_path: Path, name: str
) -> None:
    dead = 1 << 30  # more than the kernel gives
    kept = {
        f".{name}.tmp-{HOST}-{os.getpid()}-0123abcd",
        f".{name}.tmp-{HOST}-1-0123abcd",
        f".{name}.tmp-elsewhere-{dead}-0123abcd",
        f".{name}.tmp-{dead}",
        f"{name}.tmp-{HOST}-{dead}-0123abcd",
    }
    for file in (*kept, f".{name}.tmp-{HOST}-{dead}-0123abcd"):
        (tmp_path / file).touch()
    folder = tmp_path / f".x.tmp-{HOST}-{dead}-0123abcd"
    folder.mkdir()
    (folder / "a").touch()
    write_file(tmp_path / name, "")
    assert {p.name for p in tmp_path.iterdir()} == {*kept, name}


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    write_file(tmp_path / "file", "1")

    def full() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        with pytest.raises(OSError, match=str(errno.EFBIG)):
            write_file(tmp_path / "file", "2" * 1001)

    assert exit_code(forked(full)) == 0
    assert tree(tmp_path) == {"file": "1"}


def test_removing_follows_no_link(tmp_path: Path) -> None:
    make(tmp_path / "out", "1")
    (tmp_path / "link").symlink_to("out")
    for name in ("link", "none"):
        remove(tmp_path / name)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    remove(tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_running_writer_of_another_pid_namespace_keeps_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers of one host name count their processes by themselves: the number says nothing about another's."""
    monkeypatch.setattr(os, "stat", lambda *_, **__: os.stat_result([0, 7] + [0] * 8))
    atomic._host.cache_clear()
    elsewhere = atomic._host()
    monkeypatch.undo()
    atomic._host.cache_clear()
    assert elsewhere != atomic._host()
    living = tmp_path / f".file.tmp-{elsewhere}-{1 << 30}-0123abcd"
    living.touch()
    write_file(tmp_path / "file", "")
    assert living.exists()


def test_half_of_what_was_replaced_is_never_restored(tmp_path: Path) -> None:
    make(tmp_path / "out", "1")

    def killed() -> None:
        unlink = os.unlink

        def second(*arguments: Any, **options: Any) -> None:
            unlink(*arguments, **options)
            os.kill(os.getpid(), signal.SIGKILL)

        os.unlink = second
        make(tmp_path / "out", "2")

    assert exit_code(forked(killed)) == -signal.SIGKILL
    remove(tmp_path / "out")
    restore_folder(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_F216_the_rest_of_what_was_replaced_is_removed_by_the_next_writer(tmp_path: Path) -> None:
    """Also where it writes no file next to the folder: all that was replaced stayed there under a hidden name."""
    make(tmp_path / "out", "1")

    def killed() -> None:
        os.rmdir = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        make(tmp_path / "out", "2")

    assert exit_code(forked(killed)) == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2
    restore_folder(tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert tree(tmp_path / "out") == {"a": "2", "below/b": "2"}


@pytest.mark.parametrize("kind", ["file", "link", "dangling"])
def test_what_is_no_folder_is_replaced_again_and_again(tmp_path: Path, kind: str) -> None:
    (tmp_path / "target").mkdir()
    for content in ("1", "2"):
        remove(tmp_path / "out")
        if kind == "file":
            (tmp_path / "out").touch()
        else:
            (tmp_path / "out").symlink_to("target" if kind == "link" else "none")
        make(tmp_path / "out", content)
        assert tree(tmp_path / "out") == {"a": content, "below/b": content}
    assert {p.name for p in tmp_path.iterdir()} == {"out", "target"}


def test_long_names_and_permissions(tmp_path: Path) -> None:
    for name in ("a" * 255, "\u00e4" * 127):
        write_file(tmp_path / name, "1")
        (tmp_path / name).chmod(0o600)
        write_file(tmp_path / name, "2")
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
        make(tmp_path / f"{name[:-1]}b", "1")
        make(tmp_path / f"{name[:-1]}b", "2")
        assert tree(tmp_path / f"{name[:-1]}b")["a"] == "2"
