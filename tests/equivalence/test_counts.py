"""What a step on several ranks communicates and waits for, in counts; times are for benchmarks.

Host syncs are counted as what on a GPU would wait for it: reads of values (`.item()`, `float(tensor)`,
`if tensor`, `.tolist()`, `.cpu()`, `.numpy()`) and results whose size depends on values.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import unittest.mock
from pathlib import Path
from typing import Any

import overhead
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from forge_parallel import ParallelConfig, make_meshes
from forge_testing import run_on_ranks, write_job
from forge_train import Callback, Trainer, load_job

pytestmark = [pytest.mark.distributed, pytest.mark.lane("test")]
LAYERS = 2
# Per block: gathered for the forward and again for the backward, gradients scattered; the root stays
# gathered in between; what the ranks used. Then the vote, and the norm with the loss.
ONCE_BY_HAND = 2
COLLECTIVES = 3 * LAYERS + 2 + 1 + ONCE_BY_HAND


def count_benchmark(world: int) -> dict[str, dict[str, int]]:
    args = overhead.arguments(
        ["--dim", "16", "--layers", str(LAYERS), "--vocab", "32", "--seq", "8", "--device", "cpu"]
    )
    meshes = _meshes(world)
    steps = overhead.build(args, meshes)
    return {name: overhead.harness.count(step, meshes.device) for name, step in steps.items()}


@functools.cache
def _meshes(world: int) -> Any:
    return make_meshes(ParallelConfig(device="cpu", precision="fp32"))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_a_step_communicates_as_a_loop_by_hand_and_waits_for_nothing(world: int) -> None:
    for counts in run_on_ranks(world, count_benchmark, world):
        assert counts["forge"]["collectives"] == COLLECTIVES
        assert counts["by_hand"]["collectives"] == COLLECTIVES - 1  # mixes what ranks use apart
        assert counts["forge"]["syncs"] == 0


# Readers of what is on the host in any case, by module or function.
HOST_READERS = (
    "forge_data.loader",  # rows come as numpy arrays
    "forge_data.packing",
    "forge_resilience.agreement",  # votes are exchanged between hosts
    "forge_core.model.documents",  # cuts rows at documents; on an accelerator one copy, as documented
    "documents",  # context parallelism plans by ids that lie on the host
    "forge_data.batch",  # counts a batch's labels as it makes it
    "forge_parallel.host_copy",  # what was copied a step before
    "columns",  # the same numbers, of mixtures
    "_not_padding",  # forge_core looks for padding on a CPU only
)


# On an accelerator the host would wait: for a value, or for the size of a result.
_WAITING = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten._unique2.default,
}
_READERS = ("tolist", "cpu", "numpy")  # no operator on a CPU, so they are watched by name


class Counts(TorchDispatchMode):
    """Counts what would wait for an accelerator, outside HOST_READERS, and collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = self.collectives = 0
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> Counts:
        for name in _READERS:
            original = getattr(torch.Tensor, name)
            self._patches.enter_context(
                unittest.mock.patch.object(torch.Tensor, name, self._counted(original))
            )
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patches.close()
        super().__exit__(*error)

    def _counted(self, original: Any) -> Any:
        def read(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            self.reads += not _of_the_host()
            return original(tensor, *args, **options)

        return read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = func in _WAITING
        self.reads += read and not _of_the_host()
        self.collectives += func.namespace == "c10d" or (
            func.namespace == "_c10d_functional" and "wait" not in str(func)
        )
        return func(*args, **(kwargs or {}))


def _of_the_host() -> bool:
    frame: Any = sys._getframe()
    while frame is not None:
        if {frame.f_globals.get("__name__"), frame.f_code.co_name} & {*HOST_READERS}:
            return True
        frame = frame.f_back
    return False


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
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(
        RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world,
        MASTER_ADDR="127.0.0.1", MASTER_PORT="1",
    )  # fmt: skip
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
    "ep": (2, {"ep": 2}, FSDP + EP + USED + ONCE, 4 * LAYERS),  # reads: split sizes
    "pp": (2, {"pp": 2}, 2 * 2 + ONCE, 0),  # each micro-batch over one border, both ways
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_communicates_and_waits_as_often_as_it_says(tmp_path: Path, layout: str) -> None:
    world, options, collectives, reads = LAYOUTS[layout]
    settings = {**QUIET, "model.num_layers": LAYERS, "sample.max_new_tokens": 0}
    settings |= {f"parallel.{key}": value for key, value in options.items()}
    if "pp" in options:
        settings |= {"train.micro_batch": 2}
    if "ep" in options:
        settings |= {"model.moe.num_experts": 4}
    found = run_on_ranks(world, count_runner, write_job(tmp_path), settings)
    assert found == [(reads, collectives)] * world
