"""The benchmark suite: it shows a slow side, judges noise, names absent peers, fits exponents and renders its page."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks import growth, harness, render, suite
from benchmarks.rows import Row, Setting, all_rows


def taking(seconds: float) -> Callable[[Any], Callable[[], object]]:
    """A side that reports so many seconds, whatever else the machine does."""
    return lambda case: lambda: harness.Seconds(seconds)


def absent(case: Any) -> Callable[[], object]:
    raise ImportError("No module named 'peer'")


def fake(name: str, other: float, **options: Any) -> Row:
    sides = {"forge": taking(0.01), "again": taking(other), "gone": absent}
    return Row(name, lambda setting: None, sides, "no work", **options)


def arguments(folder: Path, *given: str) -> argparse.Namespace:
    return suite.arguments(
        ["--quick", "--rounds", "3", "--out", str(folder / "lines.jsonl"), *given]
    )


@pytest.mark.parametrize(
    ("rows", "verdicts", "code"),
    [
        ([fake("slow-peer", 0.03)], ["passed"], suite.PASSED),
        ([fake("slow-forge", 0.003)], ["below again"], suite.FAILED),
        ([fake("unbound", 0.003, bounds={"again": None})], ["passed"], suite.PASSED),
        ([fake("noise-start", 0.03), fake("slow-forge", 0.003)], ["void", "below again"], suite.VOID),
    ],
)  # fmt: skip
def test_a_slow_side_and_noise_are_seen(
    rows: list[Row], verdicts: list[str], code: int, tmp_path: Path
) -> None:
    assert suite.run(rows, arguments(tmp_path)) == code
    head, *lines = map(json.loads, (tmp_path / "lines.jsonl").read_text().splitlines())
    assert set(head) >= {"run", "environment", "versions", "limits"}
    assert [line["verdict"] for line in lines] == verdicts
    assert lines[0]["absent"] == {"gone": "No module named 'peer'"}


def test_a_planted_pause_slows_one_side(tmp_path: Path) -> None:
    line = suite.measure(fake("row", 0.01), arguments(tmp_path, "--slow", "forge=0.03"))
    assert line["ratios"]["again"]["q3"] == pytest.approx(0.25)


def test_sides_with_other_results_fail(tmp_path: Path) -> None:
    import torch

    sides = {"forge": lambda case: lambda: torch.ones(2), "other": lambda case: lambda: torch.zeros(2)}  # fmt: skip
    row = Row("row", lambda setting: None, sides, "", tolerance=0.5)
    line = suite.here(row, arguments(tmp_path))
    assert line["error"].startswith("AssertionError: other")


def test_the_page_shows_each_side_and_what_was_not_there(tmp_path: Path) -> None:
    suite.run([fake("noise-start", 0.01), fake("row", 0.03)], arguments(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    grown = {"growth": "x", "text": "things", "sizes": {"1": {}, "32": {}},
             "exponents": {"time": 1.2, "memory": None}, "superlinear": ["time"], "reason": "a cause"}  # fmt: skip
    text = render.page([*lines, grown])
    assert re.search(r"\| row \| .* \| again \| [\d.]+ \[.*\] \| 1.00 \| passed \|", text)
    assert "| gone | absent |" in text
    assert "| things | 1, 32 | 1.20 | under 2 MB | time; a cause |" in text
    second = [lines[0], dict(lines[2], settings="newer")]
    both = render.page([*lines, *second])
    assert both.count("| row |") == text.count("| row |")
    assert "| row | newer |" in both
    assert "not been filled" in render.page([])


def test_an_exponent_is_fitted_to_logarithms() -> None:
    sizes = [1, 4, 16, 64]
    assert growth.exponent(sizes, [3 * n**1.5 for n in sizes]) == pytest.approx(1.5)
    for name, found in growth.GROWTHS.items():
        assert len(found.sizes) >= 4, name
        assert max(found.sizes) >= 32 * min(found.sizes), name


def test_rows_begin_with_forge_and_list_their_settings() -> None:
    for name, row in all_rows().items():
        assert row.settings, name
        assert row.derive or next(iter(row.sides)) == "forge", name
        assert set(row.bounds) <= set(row.sides), name
    assert Setting("quick").of(1, 2) == 2
