"""One flipped bit in a run of each layout ends it with code 71, and the odd rank is named; without one nothing alarms."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from forge_resilience import ExitCode
from forge_resilience.replicas import training_tensors
from forge_testing.runs import Fitted, fit_on_ranks, make_job
from forge_train import Callback, Trainer, read_run
from forge_train.extensions.replicas import Replicas

pytestmark = pytest.mark.distributed

MOE = """
[model.moe]
num_experts = 4
width_multiplier = 0.5
bias_update_rate = 1e-3
sequence_loss_weight = 1e-2
"""
SMALL = {
    "train__steps": 6,
    "eval__every_steps": 3,
    "model__num_layers": 2,
    "checkpoint__every_steps": 3,
    "resilience__replicas__every_steps": 2,
}
STEP, RANK = 4, 1
BIAS = "layers.1.feed_forward.router.expert_bias"


class FlippedBit(Callback):
    """After step 4 one bit of the tensor `name` of rank 1 is another."""

    def __init__(self, name: str, after_seal: bool = False) -> None:
        self.name, self.after_seal = name, after_seal

    def on_start(self, trainer: Trainer) -> None:
        if self.after_seal:
            replicas = next(e for e in trainer.run.extensions if isinstance(e, Replicas))
            seal = replicas.after_step

            def seal_and_flip(step: int) -> None:
                seal(step)
                self._flip(trainer)

            replicas.after_step = seal_and_flip  # type: ignore[method-assign]

    def on_step_end(self, trainer: Trainer) -> None:
        if not self.after_seal:
            self._flip(trainer)

    def _flip(self, trainer: Trainer) -> None:
        if trainer.progress.step != STEP or dist.get_rank() != RANK:
            return
        tensor = training_tensors(trainer.model, trainer.optimizer)[self.name]
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        local.detach().view(-1)[:1].view(torch.uint8)[2] ^= 1


def run(folder: Path, world: int, layout: dict[str, Any], callback: Any = None, extra: str = "", **more: Any) -> list[Fitted]:  # fmt: skip
    options = {f"parallel__{key}": value for key, value in layout.items()}
    job = make_job(folder, extra)
    return fit_on_ranks(world, job, callback, **{**SMALL, **options, **more})


def mismatches(folder: Path) -> list[dict[str, Any]]:
    return [e for e in read_run(folder / "run").events if e["event"] == "mismatch"]


CASES: dict[str, tuple[int, dict[str, Any], str, list[int]]] = {
    "three copies": (3, {"dp_replicate": 3}, "embedding.weight.exp_avg_sq", [RANK]),
    "norms of tp": (2, {"tp": 2}, "layers.1.mixer_norm.weight", [0, 1]),
    "norms of stages with tp": (
        4,
        {"pp": 2, "tp": 2},
        "layers.0.mixer_norm.weight.exp_avg",
        [0, 1],
    ),
    "experts of dp": (
        4,
        {"dp_replicate": 2, "ep": 2},
        "layers.1.feed_forward.experts.up_proj",
        [1, 3],
    ),
    "buffer of all": (4, {"ep": 2}, BIAS, [RANK]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_flipped_bit_ends_the_run_before_it_is_saved(tmp_path: Path, case: str) -> None:
    world, layout, name, ranks = CASES[case]
    fitted = run(tmp_path, world, layout, partial(FlippedBit, name), MOE if "ep" in layout else "")
    assert {(f.code, f.step) for f in fitted} == {(ExitCode.HARDWARE, STEP)}
    assert len({f.problems for f in fitted}) == 1
    assert f"step {STEP}: {name} " in fitted[0].problems[0]
    # of a buffer that a model's own forward writes each rank has its own
    assert ("persistent=False" in fitted[0].problems[0]) == (name == BIAS)
    (event,) = mismatches(tmp_path)
    assert (event["kind"], event["ranks"], event["tensor"]) == ("replicas", ranks, name)
    assert event["rank"] == (RANK if len(ranks) == 1 else None)
    saved = [e["step"] for e in read_run(tmp_path / "run").events if e["event"] == "save"]
    assert saved == [3]


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize("layout", [{}, {"cp": 2}], ids=["fsdp2", "cp2"])
def test_memory_of_a_shard_that_changes_before_the_next_forward(
    tmp_path: Path, layout: dict[str, Any]
) -> None:
    fitted = run(tmp_path, 2, layout, partial(FlippedBit, "lm_head.weight", after_seal=True))
    assert [f.code for f in fitted] == [ExitCode.HARDWARE] * 2
    assert "lm_head.weight of rank 1 " in fitted[0].problems[0]
    (event,) = mismatches(tmp_path)
    assert (event["kind"], event["rank"], event["step"]) == ("memory", RANK, STEP)


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_warning_is_an_event_and_the_run_goes_on(tmp_path: Path) -> None:
    fitted = run(
        tmp_path,
        2,
        {"dp_replicate": 2},
        partial(FlippedBit, "lm_head.weight"),
        resilience__replicas__action="warn",
    )
    assert [(f.code, f.step) for f in fitted] == [(0, 6)] * 2
    assert [e["step"] for e in mismatches(tmp_path)] == [4, 6]


UNDISTURBED: dict[str, tuple[int, dict[str, Any]]] = {
    "dp_replicate2": (2, {"dp_replicate": 2}),
    "tp2": (2, {"tp": 2}),
    "tp2-whole-sequences": (2, {"tp": 2, "sequence_parallel": False}),
    "dp_replicate2-ep2": (4, {"dp_replicate": 2, "ep": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", UNDISTURBED)
def test_copies_stay_equal_in_every_layout(tmp_path: Path, layout: str) -> None:
    """Routers, norms and biases included: sums over ranks give each of them the same bits."""
    world, options = UNDISTURBED[layout]
    fitted = run(tmp_path, world, options, extra=MOE, resilience__replicas__every_steps=1)
    assert [(f.code, f.problems) for f in fitted] == [(0, ())] * world
    assert mismatches(tmp_path) == []
