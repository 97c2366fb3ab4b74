"""Reading configuration files: limits, and texts that must not run into them."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

from forge_testing.durability import synced_renames
from forge_testing.problems import rejects
from forge_train._shared.atomic import write_file
from forge_train._shared.toml_files import MAX_BYTES, MAX_DEPTH, read_toml

pytestmark = pytest.mark.lane("test")

_WORDS = ". ".join("ABCDEFGHIJKLMNOPQRSTUVWXYZ")


@pytest.mark.parametrize(
    "text",
    [
        f'x = "{_WORDS}"',
        f"x = '{_WORDS}'",
        f'x = """\n{_WORDS} \\""" {_WORDS}"""',
        f"x = '''\n{_WORDS} '' {_WORDS}'''",
        f"x = 1 # {_WORDS}",
        f'x = "# \\" {_WORDS}"',
    ],
    ids=["basic", "literal", "lines", "literal lines", "comment", "escaped quote"],
)
def test_dots_in_strings_and_comments_are_no_names(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text)
    assert read_toml(path) == tomllib.loads(text)


@pytest.mark.parametrize("part", ["a", '"a b"', "'a'", r'"\""', r'"\\"', "''"])
@pytest.mark.parametrize(
    "form", ["%sa = 1", "[%sa]", "x = { %sa = 1 }", 'x = """\n\\""""\n%sa = 1']
)
def test_long_names_never_reach_tomllib(
    tmp_path: Path, part: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs hours for them."""
    path = tmp_path / "job.toml"
    path.write_text(form % (f"{part} . " * 20_000))

    def loads(text: str) -> None:
        raise AssertionError("tomllib was called")

    monkeypatch.setattr(tomllib, "loads", loads)
    with rejects("", ..., "parts"):
        read_toml(path)


@pytest.mark.lane("quick")
@pytest.mark.parametrize(
    "text",
    ['"""' + '\\"""' * 200_000, "'''" + "''\n" * 300_000, '"\\' * 400_000, '"""' + "\\" * 900_001],
    ids=["lines", "literal lines", "basic", "backslashes"],
)
def test_a_string_without_end_is_rejected_at_once(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text("x = " + text)
    with rejects("", ..., "not_toml"):
        read_toml(path)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("x = " + "9" * 5000, "digits"),
        ("x = " + "[" * 20 + "]" * 20, "depth"),
        ("x = " + "[" * 20_000, "depth"),
        (b"x = '\xff'", "not_utf8"),
        ("#" * (MAX_BYTES + 1), "length"),
    ],
    ids=["digits", "depth", "recursion", "bytes", "size"],
)
def test_a_text_beyond_a_limit_is_rejected(tmp_path: Path, content: str | bytes, code: str) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with rejects("", ..., code):
        read_toml(path)
    path.write_text("x = " + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1))
    assert read_toml(path)


def test_files_that_are_not_text_are_rejected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, code in {
        "none": "not_found",
        ".": "not_a_file",
        "pipe": "not_a_file",
        "\0": "file_name",
    }.items():
        with rejects("", ..., code):
            read_toml(tmp_path / name)


def test_F197_a_text_is_on_the_disk_before_it_replaces_the_old_one(tmp_path: Path) -> None:
    with synced_renames() as moved:
        for text in ("a = 1\n", "a = é\n"):
            write_file(tmp_path / "config.toml", text)
            assert (tmp_path / "config.toml").read_text(encoding="utf-8") == text
    assert moved == ["config.toml"] * 2
