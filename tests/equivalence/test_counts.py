"""What a step on several ranks communicates and waits for, in counts; times are for benchmarks."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
from benchmarks.rows import ranks
from torch.distributed.tensor.debug import CommDebugMode

from forge_parallel import ParallelConfig, make_meshes
from forge_testing import run_on_ranks, write_job
from forge_testing.counts import Counts
from forge_testing.runs import as_rank
from forge_train import Callback, Trainer, load_job

pytestmark = [pytest.mark.distributed, pytest.mark.lane("test")]
LAYERS = 2
# Per block: gathered for the forward and again for the backward, gradients scattered; the root stays
# gathered in between; what the ranks used. Then the vote, and the norm with the loss.
ONCE_BY_HAND = 2
COLLECTIVES = 3 * LAYERS + 2 + 1 + ONCE_BY_HAND


def count_benchmark(world: int) -> dict[str, tuple[int, int]]:
    keys = {"vocab_size": 32, "dim": 16, "num_layers": LAYERS, "num_heads": 4}
    case = ranks.Rank(keys, 2, 8, _meshes(world))
    found: dict[str, tuple[int, int]] = {}
    for name, make in (("forge", ranks.forge), ("by_hand", ranks.by_hand)):
        step = make(case)
        step()  # whatever happens only once has happened
        with warnings.catch_warnings(), CommDebugMode() as communication:
            warnings.simplefilter("ignore")  # its hooks complain about outputs that are no tensors
            step()
        with Counts() as counts:  # sees no collectives inside of DTensor
            step()
        found[name] = (communication.get_total_counts(), counts.reads)
    return found


@functools.cache
def _meshes(world: int) -> Any:
    return make_meshes(ParallelConfig(device="cpu", precision="fp32"))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_a_step_communicates_as_a_loop_by_hand_and_waits_for_nothing(world: int) -> None:
    for counts in run_on_ranks(world, count_benchmark, world):
        assert counts["forge"] == (COLLECTIVES, 0)
        assert counts["by_hand"][0] == COLLECTIVES - 1  # mixes what ranks use apart


class CountAStep(Callback):
    """Counts from the end of one step to the end of the next."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.counts = Counts()

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step == self.after:
            self.counts.__enter__()
        elif trainer.progress.step == self.after + 1:
            self.counts.__exit__(None, None, None)


def count_runner(job: Path, overrides: dict[str, Any]) -> tuple[int, int]:
    """(reads of single values, collectives) of a step of `forge-train run`."""
    as_rank()
    callback = CountAStep(after=4)
    Trainer(load_job(job, overrides), [callback]).fit()
    return callback.counts.reads, callback.counts.collectives


QUIET = {"metrics.every_steps": 100, "eval.every_steps": 0, "checkpoint.every_steps": 0}


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch", [2, 1])
def test_the_runners_step_communicates_the_same_and_waits_for_nothing(
    tmp_path: Path, micro_batch: int
) -> None:
    job = write_job(tmp_path)
    settings = {**QUIET, "model.num_layers": LAYERS, "train.micro_batch": micro_batch}
    found = run_on_ranks(2, count_runner, job, settings)
    # with every further micro-batch FSDP gathers and scatters again; the rest is once a step
    wanted = COLLECTIVES + (2 // micro_batch - 1) * (COLLECTIVES - 3)
    assert found == [(0, wanted)] * 2


@pytest.mark.lane("quick")
@pytest.mark.parametrize("experts", [0, 2])
def test_F121_a_logged_row_reads_nothing_that_the_device_still_makes(
    tmp_path: Path, experts: int
) -> None:
    """All of a row's numbers were copied when it was made, those of mixtures too."""
    found = []
    for every in (100, 1):
        settings = {**QUIET, "sample.max_new_tokens": 0, "model.moe.num_experts": experts}
        settings |= {"metrics.every_steps": every, "run.dir": str(tmp_path / str(every))}
        found += run_on_ranks(1, count_runner, write_job(tmp_path), settings)
    (quiet, _), (logged, _) = found
    assert logged == quiet


FSDP = 3 * LAYERS + 2  # gathered twice, scattered once, per block; the root gathered once
ONCE = 2  # the vote, and the norm with the loss
USED = 1  # which parameters the ranks of FSDP used
# Per block 2 gathers and 2 scatters each way, or 2 sums; embedding, head; the loss's maxima and sums.
TP = 8 * LAYERS + 2 + 2 + 1
TP_WHOLE = 4 * LAYERS + 1 + 1 + 1
NORMS = 2 * (
    2 * LAYERS + 1
)  # their gradients, which FSDP2 sums over tp: a scatter and a gather each
# The router apart from its block; tokens there and back, each way, and their counts; choices for balance.
EP = 3 * LAYERS + 5 * LAYERS + 1
# ranks, layout, collectives, reads of values: of a step with one micro-batch (pp: two) a rank
LAYOUTS: dict[str, tuple[int, dict[str, Any], int, int]] = {
    "tp": (2, {"tp": 2}, TP + NORMS + ONCE, 0),
    "tp whole": (2, {"tp": 2, "sequence_parallel": False}, TP_WHOLE + ONCE, 0),
    "fsdp tp": (4, {"tp": 2}, FSDP + TP + NORMS + USED + ONCE, 0),
    # keys and values gathered, their gradients scattered; F120: packed rows are known to the host
    "cp": (2, {"cp": 2}, FSDP + 2 * LAYERS + USED + ONCE, 0),
    # reads: split sizes; on a CPU also the counts of experts, which choose the product
    "ep": (2, {"ep": 2}, FSDP + EP + USED + ONCE, (4 + 1) * LAYERS),
    "pp": (2, {"pp": 2}, 2 * 2 + ONCE, 0),  # each micro-batch over one border, both ways
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_communicates_and_waits_as_often_as_stated(tmp_path: Path, layout: str) -> None:
    world, options, collectives, reads = LAYOUTS[layout]
    settings = {**QUIET, "model.num_layers": LAYERS, "sample.max_new_tokens": 0}
    settings |= {f"parallel.{key}": value for key, value in options.items()}
    if "pp" in options:
        settings |= {"train.micro_batch": 2}
    if "ep" in options:
        settings |= {"model.moe.num_experts": 4}
    found = run_on_ranks(world, count_runner, write_job(tmp_path), settings)
    assert found == [(reads, collectives)] * world
