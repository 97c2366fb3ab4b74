"""What a step on several ranks communicates and waits for, in counts; times are for benchmarks.

Host syncs are counted as reads of single values (`.item()`, `float(tensor)`, `if tensor`), which on a GPU
would wait for it.
"""

from __future__ import annotations

import functools
import os
import sys
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

pytestmark = pytest.mark.distributed
LAYERS = 2
# Per block: gathered for the forward and again for the backward, gradients scattered; the root stays
# gathered in between. Then the vote, and the norm with the loss.
COLLECTIVES = 3 * LAYERS + 2 + 1 + 1


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


@pytest.mark.parametrize("world", [2, 4])
def test_a_step_communicates_as_a_loop_by_hand_and_waits_for_nothing(world: int) -> None:
    for counts in run_on_ranks(world, count_benchmark, world):
        assert counts["forge"]["collectives"] == counts["by_hand"]["collectives"] == COLLECTIVES
        assert counts["forge"]["syncs"] == 0


# Readers of what is on the host in any case, by module or function.
HOST_READERS = (
    "forge_data.batch",  # counts a batch's labels as it makes it
    "_not_padding",  # forge_core looks for padding on a CPU only
)


class Counts(TorchDispatchMode):
    """Counts reads of single values outside HOST_READERS, and collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = self.collectives = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = func is torch.ops.aten._local_scalar_dense.default
        self.reads += read and not _of_the_host()
        self.collectives += func.namespace == "c10d"
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


@pytest.mark.parametrize("micro_batch", [2, 1])
def test_the_runners_step_communicates_the_same_and_waits_for_nothing(
    tmp_path: Path, micro_batch: int
) -> None:
    job = write_job(tmp_path)
    settings = {**QUIET, "model.num_layers": LAYERS, "train.micro_batch": micro_batch}
    found = run_on_ranks(2, count_runner, job, settings)
    # with every further micro-batch FSDP gathers and scatters again; the rest is once a step
    wanted = COLLECTIVES + (2 // micro_batch - 1) * (COLLECTIVES - 2)
    assert found == [(0, wanted)] * 2
