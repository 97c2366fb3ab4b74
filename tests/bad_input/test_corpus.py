"""Every kind of bad input gets its exit code and one message that names value, rule and fix."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from forge_testing.warm import WarmProcess

from .corpus import BY_NAME, CONFIG, Call, Case
from .page import PAGE, message, prepare, row, tell

pytestmark = pytest.mark.lane("test")

# A refusal reads a few files, two of each installed package for a name, and a checkpoint where there is one;
# a CUDA build of torch opens some hundred libraries more.
MAX_OPENED = 250 + 2 * len(list(importlib.metadata.distributions()))
MAX_OPENED_WITH_CHECKPOINT = MAX_OPENED + 300
MAX_CHARACTERS = 20_000


def snapshot(folder: Path) -> list[bytes]:
    """Committed files below `folder`, which no refusal may change or lose, though it may set them aside."""
    files = [f for f in folder.rglob("*") if f.is_file() and "checkpoints" in f.parts]
    return sorted(f.read_bytes() for f in files if f.name != "lock")


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize("name", BY_NAME)
def test_F107_bad_input_is_refused_with_value_rule_and_fix(
    tmp_path: Path, warm: WarmProcess, name: str
) -> None:
    case = BY_NAME[name]
    if name == "no GPU":
        import torch

        if torch.cuda.is_available():
            pytest.skip("this machine has one")
    if "streamed" in name:
        pytest.importorskip("datasets")
    prepare(warm, case, tmp_path)
    before = snapshot(tmp_path)
    told = tell(warm, case, tmp_path)
    said = message(told)
    assert told.code == (CONFIG if isinstance(case, Call) else case.code), (told.code, told.err)
    assert "Traceback" not in told.err
    assert len(told.err) < MAX_CHARACTERS
    for part in case.says:
        assert part in said, said
    assert told.opened < (MAX_OPENED_WITH_CHECKPOINT if before else MAX_OPENED)
    assert snapshot(tmp_path) == before, "something on disk was lost"
    # other versions of Python allow deeper nesting, and the message quotes the value instead
    if name != "an object 900 deep" or sys.version_info[:2] == (3, 11):
        assert row(case, told, tmp_path) in PAGE.read_text().splitlines(), (
            "write docs/bad-input.md again: python -m tests.bad_input.page"
        )


def test_F108_a_newer_format_is_not_said_to_be_another_model() -> None:
    """And a flag that stands twice is refused."""
    (newer,) = [line for line in PAGE.read_text().splitlines() if "of a newer format" in line]
    assert "use the version that wrote it" in newer
    assert "model" not in newer
    assert isinstance(BY_NAME["F108 the same flag twice"], Case)


def test_F106_all_verbs_refuse_a_name_with_the_same_sentence() -> None:
    """`page` rows of run, explain and plan differ in nothing but the verb."""
    page = PAGE.read_text()
    for key in (
        "optimizer.name",
        "schedule.name",
        "model.moe.router",
        "callbacks.mine.name",
        "model.name",
    ):
        rows = [line.split(" | ") for line in page.splitlines() if f": {key} = " in line]
        assert len(rows) == 3, key
        assert len({tuple(row[1:]) for row in rows}) == 1, rows
        assert key in rows[0][2]
