"""The examples of the README run, and its table of exit codes is that of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forge_resilience import ExitCode

pytestmark = pytest.mark.lane("test")

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_readme_lists_exactly_these_codes() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)`", README, re.MULTILINE)
    assert {name: int(code) for code, name in rows} == {c.name: c.value for c in ExitCode}


@pytest.mark.slow  # CI runs it from the wheel, in scripts/smoke_wheels.py
def test_the_examples_of_the_readme_run() -> None:
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(examples) >= 3
    for code in examples:
        exec(compile(code, "README.md", "exec"), {})
