"""Every layout equals one process, and a classic mistake makes it differ.

The tests run a part of the cells that has every feature, layout and optimizer in it; run_cells.py runs
all and writes docs/equivalence.json.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from candidate import MUTATIONS
from cells import CELLS, FEATURES, LAYOUTS, OPTIMIZERS, SMOKE, Cell
from compare import Measured, measure, whole
from page import page
from training import Piece

pytestmark = pytest.mark.distributed
DOCS = Path(__file__).parents[2] / "docs"
MANY = [name for name, layout in LAYOUTS.items() if layout.world > 1]

measured = functools.cache(measure)


@pytest.mark.parametrize("cell", SMOKE, ids=lambda cell: cell.name)
def test_a_cell_equals_one_process(cell: Cell) -> None:
    found = measured(cell)
    assert not found.red, found


def test_the_cells_run_here_have_every_feature_layout_and_optimizer() -> None:
    parts = {part for cell in SMOKE for part in (cell.layout, cell.feature, cell.optimizer)}
    assert parts == {*LAYOUTS, *FEATURES, *OPTIMIZERS}


def test_F08_hsdp_on_a_mesh_of_two_axes() -> None:
    found = measured(Cell("hsdp_2x2", "uneven_labels", "adamw"))
    assert not found.red, found


@pytest.mark.parametrize(
    "feature", ["no_labels_on_a_rank", "no_labels_in_a_micro_batch", "no_labels_in_the_batch"]
)
def test_F12_ranks_and_micro_batches_without_labels(feature: str) -> None:
    for cell in (Cell("fsdp_2", feature, "sgd"), Cell("hsdp_2x2", feature, "adamw")):
        assert not measured(cell).red, measured(cell)


def test_F13_labels_weigh_the_same_on_all_ranks_and_micro_batches() -> None:
    for feature in ("uneven_labels", "accumulation", "accumulation_deferred"):
        assert not measured(Cell("hsdp_2x2", feature, "adamw")).red


# ---- what these comparisons would have caught

CAUGHT_BY = {
    "local label count": {"loss", "gradients", "norm", "weights"},
    "gradients averaged over ranks": {"gradients", "norm"},
    "clipping by the local norm": {"norm", "weights"},
    "another seed on one rank": {"loss", "gradients", "norm", "weights"},
}


@pytest.mark.parametrize("layout", MANY)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mistake_turns_the_cell_red(mutation: str, layout: str) -> None:
    found = measure(Cell(layout, "uneven_labels", "sgd"), mutation)
    assert CAUGHT_BY[mutation] <= set(found.red), found


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mistake_is_seen_in_bf16_too(mutation: str) -> None:
    found = measure(Cell("fsdp_2", "bf16", "sgd"), mutation)
    assert "one rank bf16" in found.red, found


def test_a_mistake_does_not_outlive_its_run() -> None:
    cell = Cell("fsdp_2", "uneven_labels", "sgd")
    measure(cell, "gradients averaged over ranks")
    assert not measure(cell).red


def test_not_a_number_is_out_of_bounds() -> None:
    cell = Cell("fsdp_2", "plain", "sgd")
    assert Measured(cell, {"loss": float("nan")}, 0.0).red == ["loss"]


def test_a_tensor_of_pieces_is_whole_only_if_they_cover_it_and_agree() -> None:
    def piece(start: int, *values: float) -> Piece:
        return Piece(torch.tensor(values), (start,), (3,))

    assert whole([piece(0, 1, 2), piece(2, 3)]).tolist() == [1, 2, 3]
    assert whole([piece(0, 1, 2), piece(1, 2, 3)]).tolist() == [1, 2, 3]
    assert whole([piece(0, 1, 2)]).isnan().tolist() == [False, False, True]
    assert whole([piece(0, 1, 2), piece(1, 5, 3)]).isnan().tolist() == [False, True, False]


# ---- the page


def test_the_page_is_what_its_json_says() -> None:
    rows = json.loads((DOCS / "equivalence.json").read_text())
    written = (DOCS / "equivalence.md").read_text()
    assert written == page(rows), "run: python tests/equivalence/run_cells.py"


def test_every_cell_is_on_the_page_within_todays_bounds() -> None:
    rows = {row["cell"]: row for row in json.loads((DOCS / "equivalence.json").read_text())}
    assert rows.keys() == {cell.name for cell in CELLS}, (
        "run: python tests/equivalence/run_cells.py"
    )
    for cell in CELLS:
        assert rows[cell.name]["bound"] == cell.bounds, cell.name
        found = Measured(cell, rows[cell.name]["error"], rows[cell.name]["seconds"])
        assert not found.red, found
