"""A smoke of the campaign, and mistakes planted in the code that it must find."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from . import page
from .campaign import chosen_suites, done_rows

pytestmark = [pytest.mark.distributed, pytest.mark.lane("test")]
SUITES = "wait,async,files,points,disk,odd,world,tensor,context,pipeline,experts,layouts"
ROOT = Path(__file__).resolve().parents[2]


def campaign(
    tmp_path: Path, *arguments: str
) -> tuple[list[dict], subprocess.CompletedProcess[str]]:
    """The rows of a campaign in a process of its own, which must not have used torch before it forks."""
    out = tmp_path / "rows.jsonl"
    command = [
        sys.executable,
        "-m",
        "tests.chaos.campaign",
        "--out",
        str(out),
        "--keep",
        str(tmp_path),
    ]
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=540
    )
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    return rows, done


@pytest.mark.slow
def test_twenty_faults_of_all_suites_change_no_bit(tmp_path: Path) -> None:
    rows, done = campaign(tmp_path, "--faults", "20", "--seed", "11", "--suite", SUITES)
    problems = [row for row in rows if row["problem"]]
    assert done.returncode == 0, (problems, done.stdout[-2000:], done.stderr[-2000:])
    assert len(rows) >= 18
    assert {row["suite"] for row in rows} == set(SUITES.split(","))


def test_a_campaign_goes_on_after_its_last_row_and_repeats_what_failed(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    assert done_rows(out) == set()
    row = {"suite": "wait", "campaign_seed": 0}
    results = [(1, ""), (2, "lost 9 steps"), (3, "lost 9 steps"), (3, "")]
    out.write_text(
        "".join(json.dumps({**row, "number": n, "problem": p}) + "\n" for n, p in results)
    )
    assert done_rows(out) == {("wait", 0, 1), ("wait", 0, 3)}


def test_srun_is_in_no_smoke_and_is_left_out_where_no_slurm_can_run(monkeypatch, capsys) -> None:
    assert "srun" not in chosen_suites("", campaign=False)
    monkeypatch.setattr("tests.chaos.campaign.why_not", lambda: "install slurmd")
    assert "srun" not in chosen_suites("", campaign=True)
    assert chosen_suites("wait,srun", campaign=False) == ["wait"]
    assert "install slurmd" in capsys.readouterr().err
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    assert chosen_suites("wait,disk", campaign=False) == ["wait"]
    assert "LD_PRELOAD" in capsys.readouterr().err


def test_rows_become_cells_and_a_page() -> None:
    row = {"suite": "files", "kind": "truncate of data", "phase": "between", "campaign_seed": 0, "number": 3,
           "commit": "abc", "problem": "", "recovery_seconds": 1.5}  # fmt: skip
    cells = page.merge([], [row, row | {"number": 4, "problem": "lost 9 steps"}])
    assert cells[0]["numbers"] == [3, 4]
    assert cells[0]["failed"] == {"4": "lost 9 steps"}
    text = page.page(cells)
    assert "**2 faults, 1 failures (below).**" in text
    assert "lost 9 steps" in text
    mended = page.merge(cells, [row | {"number": 4, "recovery_seconds": 2.0}])
    assert (mended[0]["failed"], mended[0]["worst_seconds"]) == ({}, 2.0)
    assert "**2 faults, 0 failures.**" in page.page(mended)


def test_the_page_is_that_of_its_json() -> None:
    cells = json.loads((ROOT / "docs/data/reliability.json").read_text())
    assert (ROOT / "docs/reliability.md").read_text() == page.page(cells)
