"""The example of the README runs as it stands."""

import re
from importlib.metadata import metadata
from pathlib import Path

import pytest

pytestmark = pytest.mark.lane("test")


def readme() -> str:
    beside = Path(__file__).parent.parent / "README.md"
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    return str(metadata("forge-data").get_payload())  # from an installed wheel


@pytest.mark.slow  # CI runs it from the wheel, in scripts/smoke_wheels.py
def test_the_first_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    example = re.search(r"```python\n(.*?)```", readme(), re.DOTALL).group(1)
    scope = {"__name__": "readme"}
    exec(example, scope)
    assert scope["resumed"].cursor == scope["loader"].cursor
