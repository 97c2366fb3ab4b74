"""The example of the README runs."""

import re
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.lane("test")


@pytest.mark.slow  # CI runs it from the wheel, in scripts/smoke_wheels.py
def test_the_first_example_runs(tmp_path, monkeypatch, capsys):
    text = (Path(__file__).parents[1] / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    monkeypatch.setattr(tempfile, "mkdtemp", lambda: str(tmp_path))
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("[5, 10] ")
    exec(compile(code, "README.md", "exec"), {})  # again: it resumes and has nothing to do
