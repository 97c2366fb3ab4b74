"""What is saved in one layout goes on in another; a ring of the pairs, and the page of all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from .page import page
from .pairs import BOUND, LAYOUTS, PAIRS, RING, Measured, Run, bounds, pair, run

pytestmark = [pytest.mark.distributed, pytest.mark.lane("test")]
DOCS = Path(__file__).parents[2] / "docs"
SHORT = [("one", "fsdp2"), ("pp2", "one")]  # of the fast lane


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Runs that stay in their layout, made when they are asked for."""

    class Runs(dict[str, Run]):
        def __missing__(self, layout: str) -> Run:
            self[layout] = run(tmp_path_factory.mktemp(layout), layout, 0)
            return self[layout]

    return Runs()


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        *SHORT,
        *(pytest.param(names, marks=pytest.mark.slow) for names in RING if names not in SHORT),
    ],
    ids=lambda names: " to ".join(names),
)
def test_saved_in_one_layout_goes_on_in_another(
    runs: dict[str, Run], tmp_path: Path, names: tuple[str, str]
) -> None:
    found = pair(tmp_path, runs[names[0]], names, 0)
    assert not found.red, found


@pytest.mark.slow
def test_all_that_training_changes_is_compared(runs: dict[str, Run]) -> None:
    saved = runs["one"].saved
    for part in ("expert_bias", "experts", "exp_avg", "exp_avg_sq", "embed"):
        found = {name: tensor for name, tensor in saved.items() if part in name}
        assert found, part
        assert all(torch.count_nonzero(tensor) for tensor in found.values()), part
        ends = runs["one"].end
        assert not any(torch.equal(tensor, ends[name]) for name, tensor in found.items()), part


@pytest.mark.slow
def test_a_moment_with_other_bits_is_seen(runs: dict[str, Run], tmp_path: Path) -> None:
    before = runs["one"]
    name = next(name for name in before.saved if name.endswith("exp_avg_sq"))
    saved = {**before.saved, name: before.saved[name] + 1e-12}
    found = pair(tmp_path, Run(saved, before.end, before.losses, before.folder), ("one", "one"), 0)
    assert found.red == ["contents"]
    assert found.error["contents"] == 1
    assert found.error["loss"] == found.error["weights"] == 0


def test_the_ring_has_every_layout_twice() -> None:
    assert len(LAYOUTS) == len(RING) == 12
    assert len(PAIRS) == 132
    assert {first for first, _ in RING} == {then for _, then in RING} == set(LAYOUTS)
    assert {*RING} <= {*PAIRS}


def test_the_page_matches_its_json() -> None:
    rows = json.loads((DOCS / "data/reshard.json").read_text())
    assert (DOCS / "reshard.md").read_text() == page(rows, LAYOUTS), "run: hatch run reshard"


def test_every_pair_is_on_the_page_within_todays_bounds() -> None:
    rows = {row["pair"]: row for row in json.loads((DOCS / "data/reshard.json").read_text())}
    assert set(rows) == {" -> ".join(names) for names in PAIRS}, "run: hatch run reshard"
    for row in rows.values():
        assert row["bound"] == bounds()
        first, then = row["pair"].split(" -> ")
        found = Measured(first, then, row["seed"], row["error"], row["seconds"])
        assert not found.red, found
    assert bounds()["loss"] == BOUND
