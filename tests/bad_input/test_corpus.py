"""Every kind of bad input has the exit code, keys and codes of docs/data/bad-input.json, and loses nothing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from pathlib import Path

import pytest

from forge_testing.warm import WarmProcess

from .corpus import BY_NAME
from .page import RECORD, answer, message, prepare, wrong

pytestmark = pytest.mark.lane("test")

# A refusal reads a few files, two of each installed package for a name, and a checkpoint where there is one;
# a CUDA build of torch opens some hundred libraries more, and a first step imports Triton where it is installed.
MAX_OPENED = 250 + 2 * len(list(importlib.metadata.distributions()))
MAX_OPENED += 250 if importlib.util.find_spec("triton") else 0
MAX_OPENED_WITH_CHECKPOINT = MAX_OPENED + 300
MAX_CHARACTERS = 20_000
RECORDED = json.loads(RECORD.read_text())


def snapshot(folder: Path) -> list[bytes]:
    """Committed files below `folder`, which no refusal may change or lose, though it may set them aside."""
    files = [f for f in folder.rglob("*") if f.is_file() and "checkpoints" in f.parts]
    return sorted(f.read_bytes() for f in files if f.name != "lock")


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize("name", BY_NAME)
def test_F107_bad_input_is_rejected_with_value_rule_and_fix(
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
    given = answer(warm, case, tmp_path)
    assert not wrong(name, given, RECORDED), given.called.err
    assert "Traceback" not in given.called.err
    assert len(given.called.err) < MAX_CHARACTERS
    key, _ = given.problems[0]
    assert key in message(given.called)
    assert given.called.opened < (MAX_OPENED_WITH_CHECKPOINT if before else MAX_OPENED)
    assert snapshot(tmp_path) == before, "something on disk was lost"


def test_the_record_has_exactly_the_inputs() -> None:
    assert RECORDED.keys() == BY_NAME.keys()


def test_F108_a_newer_format_is_not_another_model() -> None:
    row = RECORDED["a checkpoint of a newer format"]  # prose: the name of a case
    assert row["problems"][0] == ["format", "version"]


@pytest.mark.parametrize(
    "key",
    ["optimizer.name", "schedule.name", "model.moe.router", "callbacks.mine.name", "model.name"],
)
def test_F106_all_verbs_reject_a_name_alike(key: str) -> None:
    rows = [row for name, row in RECORDED.items() if f": {key} = " in name]
    assert len(rows) == 3
    assert all(row == rows[0] for row in rows)
    assert key in [found for found, _ in rows[0]["problems"]]
