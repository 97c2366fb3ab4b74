"""Reading configuration files: limits, and texts that must not run into them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from forge_train.config.files import read_toml

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
    with pytest.raises(ValueError, match="more than 16 parts; write fewer dots"):
        read_toml(path)


@pytest.mark.lane("quick")
@pytest.mark.parametrize(
    "text",
    ['"""' + '\\"""' * 200_000, "'''" + "''\n" * 300_000, '"\\' * 400_000, '"""' + "\\" * 900_001],
    ids=["lines", "literal lines", "basic", "backslashes"],
)
def test_a_string_without_end_is_refused_at_once(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text("x = " + text)
    with pytest.raises(ValueError, match="not valid TOML"):
        read_toml(path)
