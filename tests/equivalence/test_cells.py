"""Every layout equals one process, and a classic mistake makes it differ.

The tests run few cells in which every axis, pair of axes, schedule, feature and optimizer occurs;
run_cells.py runs all and writes docs/data/equivalence.json.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import BY_NAME, CELLS, FEATURES, LAYOUTS, OPTIMIZERS, SMOKE, Cell
from compare import Measured, measure, whole
from invalid_cells import REJECTIONS, rejection
from mutations import MUTATIONS
from page import RANDOM_JOBS, page
from training import Piece

from forge_testing.schedules import marks

pytestmark = [pytest.mark.distributed, pytest.mark.lane("test")]
DOCS = Path(__file__).parents[2] / "docs"

measured = functools.cache(measure)


def of_each(parts: Callable[[Cell], Iterable[Any]]) -> set[Cell]:
    """For each part that cells of SMOKE have, one that has it: not compiled if possible, and on few ranks."""

    def work(cell: Cell) -> tuple[bool, int]:
        return "compile" in FEATURES[cell.feature].parallel, LAYOUTS[cell.layout].world

    first: dict[Any, Cell] = {}
    for cell in sorted(SMOKE, key=work):
        for part in parts(cell):
            first.setdefault(part, cell)
    return set(first.values())


QUICK = of_each(lambda cell: LAYOUTS[cell.layout].axes)
IN_CI = {c for c in of_each(lambda c: [LAYOUTS[c.layout].axes]) if LAYOUTS[c.layout].world <= 4}


def param(cell: Cell) -> Any:
    lanes = [pytest.mark.slow] if cell not in QUICK else []
    if cell in IN_CI - QUICK:
        lanes.append(pytest.mark.lane("ci"))
    return pytest.param(cell, id=cell.name, marks=[*lanes, *marks(LAYOUTS[cell.layout].keys)])


@pytest.mark.slow
@pytest.mark.parametrize("cell", [param(cell) for cell in SMOKE])
def test_a_cell_equals_one_process(cell: Cell) -> None:
    found = measured(cell)
    assert not found.red, found


def test_the_cells_run_here_have_every_axis_pair_schedule_feature_and_optimizer() -> None:
    parts = {part for cell in SMOKE for part in cell.parts}
    assert {*FEATURES, *OPTIMIZERS, *BY_NAME} - {"inductor"} <= parts
    assert {layout.axes for layout in LAYOUTS.values()} <= parts


def test_every_pair_of_axes_and_of_axis_and_feature_occurs() -> None:
    """pp with each schedule and cp with each exchange are one axis here; a mixture is what ep is about."""
    pairs = set()
    for cell in CELLS:
        axes = {axis.split(" ")[0].rstrip(",") for axis in LAYOUTS[cell.layout].axes}
        pairs |= {frozenset(pair) for pair in combinations(sorted({*axes, cell.feature}), 2)}
    axes = ["dp_replicate", "dp_shard", "tp", "cp", "pp", "ep"]
    assert not {frozenset(pair) for pair in combinations(axes, 2)} - pairs
    wanted = ["accumulation", "packed", "tied_embeddings", "qk_norm", "recompute_full", "compile"]
    wanted += ["recompute_selective", "recompute_every_2", "bf16", "moe", "moe_bias", "moe_packed"]
    missing = {frozenset((a, f)) for a in axes[:-1] for f in wanted} - pairs
    assert not missing
    mixtures = ["moe", "moe_bias", "moe_packed", "moe_global", "moe_recompute", "moe_selective"]
    assert not {frozenset(("ep", f)) for f in [*mixtures, "moe_compile"]} - pairs


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks(asked.keys)) for name, asked in REJECTIONS.items()]
)
def test_a_combination_without_a_cell_is_rejected(name: str) -> None:
    key, code, _ = rejection(name)
    assert (key, code) == REJECTIONS[name].problem


# ---- failures that are known elsewhere, by number


def green(*cells: Cell) -> bool:
    return not any(measured(cell).red for cell in cells)


@pytest.mark.slow
def test_F03_F04_gradients_of_experts_and_their_norm() -> None:
    assert green(Cell("ep", "moe", "sgd"), Cell("hsdp_ep", "moe_bias", "sgd"))


@pytest.mark.slow
@pytest.mark.needs_torch("2.13")
def test_F05_F06_gradients_and_clipping_over_stages() -> None:
    assert green(Cell("fsdp_pp_zbv", "accumulation", "sgd"), Cell("hsdp_pp", "accumulation", "sgd"))


@pytest.mark.slow
def test_F07_norms_of_heads_under_tensor_parallelism() -> None:
    assert green(Cell("hsdp_tp", "qk_norm", "sgd"))


@pytest.mark.slow
def test_F08_hsdp_on_a_mesh_of_two_axes() -> None:
    assert green(Cell("hsdp_2x2", "uneven_labels", "adamw"))


@pytest.mark.slow
def test_F09_pipelines_with_tensor_parallelism() -> None:
    assert green(Cell("tp_pp", "packed", "sgd"), Cell("fsdp_tp_pp", "packed", "sgd"))


@pytest.mark.slow
def test_F10_packed_rows_in_pipelines_and_over_context_ranks() -> None:
    assert green(Cell("fsdp_pp_interleaved", "packed", "sgd"), Cell("cp_pp", "packed", "sgd"))


@pytest.mark.slow
def test_F131_positions_are_counted_on_full_sequences() -> None:
    """Of a model with images too, whose stream is a part of the tokens under sequence parallelism."""
    assert green(Cell("tp", "towers_recompute", "sgd"), Cell("tp_cp", "towers", "sgd"))


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize(
    ("layout", "feature"),
    [("tp", "cross"), ("cp", "picture_towers"), ("pp_1f1b", "picture_experts"), ("fsdp_tp", "pictures")],
)  # fmt: skip
def test_F75_a_reader_without_images_among_readers_with_some(layout: str, feature: str) -> None:
    assert green(Cell(layout, feature, "sgd"))


@pytest.mark.slow
def test_F11_tied_embeddings_at_the_two_ends_of_a_pipeline() -> None:
    assert green(Cell("fsdp_pp_gpipe", "tied_embeddings", "sgd"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "feature", ["no_labels_on_a_rank", "no_labels_in_a_micro_batch", "no_labels_in_the_batch"]
)
def test_F12_ranks_and_micro_batches_without_labels(feature: str) -> None:
    assert green(Cell("fsdp_2", feature, "sgd"), Cell("hsdp_2x2", feature, "adamw"))


@pytest.mark.slow
def test_F13_labels_have_the_same_weight_on_all_ranks_and_micro_batches() -> None:
    for feature in ("uneven_labels", "accumulation", "accumulation_deferred"):
        assert green(Cell("hsdp_2x2", feature, "adamw"))


@pytest.mark.slow
def test_F86_ranks_and_micro_batches_that_take_different_branches() -> None:
    assert green(Cell("hsdp_2x2", "branches", "adamw"), Cell("fsdp_pp_1f1b", "branches", "sgd"))


@pytest.mark.slow
def test_F88_weights_swapped_around_an_evaluation() -> None:
    assert green(Cell("one_rank", "bf16_swapped", "sgd"), Cell("pp_1f1b", "swapped", "sgd"))


@pytest.mark.slow
def test_F101_readers_that_do_not_divide_the_batch() -> None:
    assert green(Cell("fsdp_3", "dealt_packed", "adamw"), Cell("pp_dp3", "dealt_moe", "adamw"))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["grouped_mm", "loop", "batched"])
def test_F101_a_reader_that_has_only_padding_sequences(backend: str) -> None:
    """Under selective recomputation, with experts over ranks."""
    cells = [c for c in CELLS if c.layout == "efsdp_ep" and c.feature == f"idle_moe_{backend}"]
    assert len(cells) == 1
    assert green(*cells)


@pytest.mark.slow
def test_F86_deferred_sums_in_bf16_keep_the_earlier_micro_batches() -> None:
    assert green(Cell("fsdp_2", "bf16_deferred", "sgd"))


# ---- what these comparisons would have caught

EVERYTHING = {"loss", "gradients", "norm", "weights"}
CAUGHT = [
    ("local label count", "uneven_labels", ("fsdp_2", "hsdp_2x2"), EVERYTHING),
    ("local label count", "packed", ("fsdp_cp", "tp_pp"), {"loss", "gradients", "norm"}),
    ("gradients averaged over ranks", "packed", ("hsdp_2x2", "cp", "fsdp_pp_1f1b"), {"gradients", "norm"}),
    ("clipping by the local norm", "uneven_labels", ("fsdp_2", "hsdp_2x2"), {"norm", "weights"}),
    ("another seed on one rank", "uneven_labels", ("fsdp_2", "hsdp_2x2"), EVERYTHING),
    ("a norm without the last stage", "accumulation", ("pp_1f1b", "hsdp_pp"), {"norm", "weights"}),
    ("experts' gradients not summed", "moe", ("efsdp_ep",), {"gradients", "norm"}),
    ("a sum over tp made twice", "packed", ("tp_whole",), EVERYTHING),
    ("gradients of head norms not summed", "qk_norm", ("tp", "tp_pp"), {"gradients", "norm"}),
    ("tied ends synchronised twice", "tied_embeddings", ("pp_1f1b", "tp_pp"), {"gradients", "norm"}),
    ("biases from one rank's counts", "moe_bias", ("ep", "tp_ep"), {"weights"}),
    ("each rank reduces what it used", "branches", ("fsdp_2",), {"gradients", "norm"}),
    ("weights gathered after an evaluation", "swapped", ("fsdp_2", "tp_whole"), EVERYTHING),
    ("Muon of shards", "packed", ("fsdp_2", "tp", "fsdp_tp"), {"weights"}),
    ("Muon of shards", "moe", ("hsdp_tp_ep",), {"weights"}),
    ("filler that counts", "dealt_moe", ("fsdp_3", "pp_dp3"), {"routes", "weights"}),
    ("gradients of an encoder not summed", "pictures", ("tp", "tp_pp"), {"gradients"}),
]  # fmt: skip


def tries() -> Iterator[Any]:
    """Each mistake in all of its layouts: the first is in the lane `ci`."""
    seen = set()
    for mutation, feature, layouts, quantities in CAUGHT:
        for layout in layouts:
            first = [] if mutation in seen else [pytest.mark.lane("ci")]
            seen.add(mutation)
            marked = [pytest.mark.slow, *first]
            yield pytest.param(mutation, feature, layout, quantities, marks=marked)


@pytest.mark.parametrize(("mutation", "feature", "layout", "quantities"), list(tries()))
def test_a_mistake_makes_the_cell_red(
    mutation: str, feature: str, layout: str, quantities: set[str]
) -> None:
    optimizer = "muon" if mutation.startswith("Muon") else "sgd"
    found = measure(Cell(layout, feature, optimizer), mutation)
    assert quantities <= set(found.red), found


def test_every_mistake_is_tried() -> None:
    assert {mutation for mutation, *_ in CAUGHT} == set(MUTATIONS)


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize("mutation", list(MUTATIONS)[:4])
def test_a_mistake_is_seen_in_bf16_too(mutation: str) -> None:
    found = measure(Cell("fsdp_2", "bf16", "sgd"), mutation)
    assert "one rank bf16" in found.red, found


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_mistake_does_not_outlive_its_run() -> None:
    cell = Cell("fsdp_2", "uneven_labels", "sgd")
    measure(cell, "gradients averaged over ranks")
    assert not measure(cell).red


def test_not_a_number_is_out_of_bounds() -> None:
    cell = Cell("fsdp_2", "plain", "sgd")
    assert Measured(cell, {"loss": float("nan")}, 0.0).red == ["loss"]


def test_shards_are_a_full_tensor_only_if_they_cover_it_and_agree() -> None:
    def piece(start: int, *values: float) -> Piece:
        return Piece(torch.tensor(values), (start,), (3,))

    assert whole([piece(0, 1, 2), piece(2, 3)]).tolist() == [1, 2, 3]
    assert whole([piece(0, 1, 2), piece(1, 2, 3)]).tolist() == [1, 2, 3]
    assert whole([piece(0, 1, 2)]).isnan().tolist() == [False, False, True]
    assert whole([piece(0, 1, 2), piece(1, 5, 3)]).isnan().tolist() == [False, True, False]


# ---- the page


def test_the_page_matches_its_json() -> None:
    rows = json.loads((DOCS / "data/equivalence.json").read_text())
    written = (DOCS / "equivalence.md").read_text()
    assert written.partition(RANDOM_JOBS)[0] == page(rows), "run: hatch run matrix"


def test_every_cell_is_on_the_page_within_todays_bounds() -> None:
    rows = {
        row.get("cell") or row["refused"]: row
        for row in json.loads((DOCS / "data/equivalence.json").read_text())
    }
    assert rows.keys() == {*(cell.name for cell in CELLS), *REJECTIONS}, "run: hatch run matrix"
    for cell in CELLS:
        assert rows[cell.name]["bound"] == cell.bounds, cell.name
        found = Measured(cell, rows[cell.name]["error"], rows[cell.name]["seconds"])
        assert not found.red, found
    for name, refusal in REJECTIONS.items():
        assert (rows[name]["key"], rows[name]["code"]) == refusal.problem
