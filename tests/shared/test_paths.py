"""The shared topic `paths`, by the copy of one package; `check` compares the bytes of the others."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from forge_data._shared.paths import (
    expand_fields,
    files_named,
    open_regular,
    read_regular,
    user_path,
)
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")


@pytest.mark.parametrize("name", ["~ada/x", "$HOME/x", "a/~/x", "data[v2]", "a*b", "", "x~/y"])
def test_F149_only_a_leading_tilde_and_slash_is_expanded(name: str, monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert user_path(name) == Path(name)
    assert user_path(f"~/{name}") == user_path(Path("~/") / name) == Path("/home/ada", name)


@dataclass(frozen=True)
class Config:
    path: str = field(metadata={"path": True})
    text: str

    def __post_init__(self) -> None:
        expand_fields(self)


def test_F149_fields_that_are_paths_are_expanded(monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert vars(Config("~/a", "~/b")) == {"path": "/home/ada/a", "text": "~/b"}
    assert Config(None, "").path is None


def test_F149_names_are_literal(tmp_path) -> None:
    for name in ("[a]1.txt", "[a]2.txt", "a1.txt", "[a]1.md"):
        (tmp_path / name).touch()
    assert [p.name for p in files_named(tmp_path, "[a]", ".txt")] == ["[a]1.txt", "[a]2.txt"]
    assert files_named(tmp_path / "none") == []


def test_regular_files_of_a_bound_are_read_and_others_are_not_waited_for(tmp_path) -> None:
    (tmp_path / "a").write_bytes(b"123")
    (tmp_path / "link").symlink_to("a")
    os.mkfifo(tmp_path / "fifo")
    assert read_regular(tmp_path / "link", 3) == b"123"
    with rejects("", 3, "length"):
        read_regular(tmp_path / "a", 2)
    for name in (tmp_path, tmp_path / "fifo", "/dev/zero"):
        with rejects("", ..., "not_a_file", where=name):
            open_regular(name)
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        open_regular(tmp_path / "none")
