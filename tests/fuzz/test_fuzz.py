"""The fuzzer itself: draws, rules, shrinking and counts, and a few of its jobs."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fuzz import page
from tests.fuzz.attempt import Result, plans
from tests.fuzz.compare import MARGIN, bounds_of, compare
from tests.fuzz.draw import draw, values
from tests.fuzz.files import write_job
from tests.fuzz.job import Job, axes, layout_keys, world_of
from tests.fuzz.rules import MOST_RANKS, allowed, default
from tests.fuzz.run import arguments, main, read_job, try_job
from tests.fuzz.shrink import cause, shrink

pytestmark = pytest.mark.lane("test")

# ---- draws


def test_a_draw_is_a_function_of_seed_number_and_attempt(tmp_path: Path) -> None:
    assert draw(3, 5) == draw(3, 5)
    assert (
        len(
            {
                draw(3, 5).to_json(),
                draw(3, 5, 1).to_json(),
                draw(3, 6).to_json(),
                draw(4, 5).to_json(),
            }
        )
        == 4
    )
    one, two = (write_job(draw(3, 5), tmp_path / name) for name in "ab")
    assert one.read_text() == two.read_text().replace(str(tmp_path / "b"), str(tmp_path / "a"))


def test_a_job_is_the_same_after_a_line_of_json() -> None:
    for number in range(20):
        job = draw(0, number)
        assert Job.from_json(job.to_json()) == job


def test_numbers_of_a_seed_cycle_through_each_value() -> None:
    others = [pair for pair in values() if pair[1] != default(pair[0])]
    jobs = [draw(1, number) for number in range(2 * len(others))]
    seen = Counter(pair for job in jobs for pair in job.choice.items())
    assert not {pair for pair in others if not seen[pair]}
    assert all(seen[axis, default(axis)] == 0 for axis in axes())  # defaults are left out


def test_drawn_jobs_follow_the_rules_in_both_layouts() -> None:
    layout = {name for name, axis in axes().items() if axis.area == "layout"}
    for number in range(100):
        job = draw(2, number)
        assert allowed(job.choice)
        assert all(world_of(keys) <= MOST_RANKS for keys in job.layouts())
        assert len(job.layouts()) == len(plans(job))
        if job.then is not None:
            assert allowed({**{k: v for k, v in job.choice.items() if k not in layout}, **job.then})
            assert layout_keys(job.then) != layout_keys(job.choice)


def test_only_fixes_values_and_impossible_ones_are_named() -> None:
    for number in range(5):
        job = draw(0, number, only={"tp": "2", "optimizer": "muon"})
        assert (job["tp"], job["optimizer"]) == ("2", "muon")
    with pytest.raises(ValueError, match="capacity"):
        draw(0, 0, only={"tp": "2", "capacity": "position"})
    with pytest.raises(SystemExit):
        arguments(["--only", "tp=7"])


# ---- shrinking


def test_shrinking_leaves_what_the_predicate_needs() -> None:
    seen: list[Job] = []

    def differs(job: Job) -> bool:
        seen.append(job)
        return (
            job["optimizer"] == "muon" and world_of(job.layouts()[0]) > 1 and job.sizes["steps"] > 2
        )

    job = next(j for n in range(1000) if differs(j := draw(0, n, only={"optimizer": "muon"})))
    small = shrink(job, differs)
    assert differs(small)
    assert set(small.choice) - {"optimizer"} <= {"data ranks", "tp", "cp", "pp"}
    assert len(small.choice) == 2
    assert (small.sizes["steps"], small.sizes["seq_len"]) == (3, 2)
    assert cause(small).count(" = ") == 2
    assert all(allowed(candidate.choice) for candidate in seen)
    assert shrink(job, differs) == small
    assert shrink(job, differs, lambda: True) == job


def test_what_needs_a_dropped_value_goes_with_it() -> None:
    job = next(j for n in range(1000) if (j := draw(0, n, only={"ep": "2"})).has("router losses"))
    small = shrink(job, lambda j: not j.has("experts"))
    assert not set(small.choice) & {"ep", "router losses", "experts"}


# ---- comparison


def _result(**changes: Any) -> Result:
    row = {
        "step": 1,
        "loss": 2.0,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens": 8,
        "instances": "a",
        "val_loss": None,
    }
    rows = [row, {**row, "step": 2, "tokens": 16, "val_loss": 2.0}]
    rows[1] |= changes
    return Result(rows, {"w": torch.tensor([1.0, 2.0])}, {"w": torch.zeros(2)})


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"loss": 2.0 * (1 + 2e-5)}, 2.0),
        ({"grad_norm": 1 + 3e-5}, 3.0),
        ({"val_loss": 2.0 * (1 - 4e-5)}, 4.0),
        ({"lr": 1e-3 * (1 + 1e-12)}, 100.0),
        ({"tokens": 15}, float("inf")),
        ({"instances": "b"}, float("inf")),
        ({"loss": None}, float("inf")),
        ({"loss": float("nan")}, float("nan")),
    ],
)
def test_the_first_quantity_that_differs_is_named(change: dict[str, Any], error: float) -> None:
    job, wanted = Job("0"), _result()
    found = compare(job, _result(**change), wanted).difference
    assert found is not None
    assert (found.quantity, found.step) == (*change, 2)
    assert found.error == pytest.approx(error, rel=1e-2, nan_ok=True)
    assert compare(job, _result(loss=2.0 * (1 + 5e-6)), wanted).difference is None


def test_weights_are_compared_by_their_largest_value_and_close_routes_are_not() -> None:
    job, wanted = Job("0"), _result()
    other = replace(wanted, weights={"w": torch.tensor([1.0 + 6e-5, 2.0])})
    found = compare(job, other, wanted).difference
    assert found is not None
    assert (found.quantity, found.step) == ("weights w", None)
    assert found.error == pytest.approx(3.0, rel=1e-2)
    close = replace(wanted, margins=[1.0, MARGIN / 2])
    compared = compare(job, replace(other, rows=_result(loss=9.0).rows), close)
    assert (compared.difference, compared.steps) == (None, 1)
    assert bounds_of(job.with_value("precision", "bf16")).loss > bounds_of(job).loss


# ---- counts


def test_counts_of_campaigns_add_up(tmp_path: Path) -> None:
    row = {"kind": "equal", "choice": {"tp": "2", "norm": "layer_norm"}, "job": "0.0.0"}
    rejected = {"kind": "rejected", "choice": {"tp": "3"}, "problem": ["tp", "divides"]}
    bad = {
        **row,
        "kind": "different",
        "against": "reference",
        "shrunk": {"cause": "tp = 2"},
        "text": "loss",
        "explained": "",
    }
    for _ in range(2):
        page.record([row, rejected, bad], 0, 60.0, tmp_path / "fuzz.json")
    found = page.read(tmp_path / "fuzz.json")
    assert found["axes"]["tp"] == {"2": {"equal": 2, "different": 2}}
    assert found["axes"]["cp"] == {"1": {"equal": 2, "different": 2}}
    assert found["pairs"] == {"norm": {"tp": 4}}
    assert found["rejected"] == [{"key": "tp", "code": "divides", "jobs": 2}]
    text = page.section(found)
    assert "4 jobs: 2 equal" in text
    assert "2: 4" in text
    assert page.with_section(page.with_section("a\n", text), text) == page.with_section("a\n", text)


def test_the_section_of_the_page_matches_its_json() -> None:
    written = page.PAGE.read_text()
    assert (page.BEGIN in written) == page.JSON.exists()
    if page.JSON.exists():
        assert written == page.with_section(
            written, page.section(json.loads(page.JSON.read_text()))
        )


# ---- jobs


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.lane("ci")
def test_jobs_of_a_seed_are_equal(tmp_path: Path) -> None:
    code = main(
        ["--seed", "13", "--count", "3", "--folder", str(tmp_path), "--shrink-minutes", "0"]
    )
    rows = [json.loads(line) for line in (tmp_path / "jobs.jsonl").read_text().splitlines()]
    assert code == 0, [row["text"] for row in rows]
    assert sum(row["kind"] == "equal" for row in rows) == 3
    assert all(row["steps"] for row in rows if row["kind"] == "equal")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.lane("ci")
def test_a_mistake_is_found_and_a_rejected_job_has_its_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = {"optimizer": "adamw", "images": "none", "experts": "none", "precision": "fp32"}
    job = draw(0, 0, only={**plain, "mixer": "attention", "kv heads": "grouped"})
    wrong = job.with_size("num_heads", 5).with_size("num_kv_heads", 2)
    found = try_job(wrong, tmp_path / "rejected")
    assert (found.kind, found.problem) == ("rejected", ("model.num_heads", "divides"))
    from tests.fuzz import files

    base = files._base

    def other(job: Job, folder: Path) -> dict[str, Any]:
        """Another rate where the ranks train."""
        return {**base(job, folder), "optimizer.lr": 6e-3 if folder.name == "ranks" else 5e-3}

    monkeypatch.setattr(files, "_base", other)
    mistake = replace(job, without=frozenset())
    found = try_job(mistake, tmp_path / "wrong")
    assert found.kind in ("different", "equal")


def test_a_shrunk_job_is_read_from_its_file(tmp_path: Path) -> None:
    job = draw(1, 1)
    (tmp_path / "shrunk.toml").write_text(f"# seed\n# job: {job.to_json()}\n[run]\n")
    assert read_job(tmp_path / "shrunk.toml") == job
