"""A checkpoint opened and evaluated in layouts: the weights and numbers of one process, whatever the run was trained in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forge_parallel import ParallelConfig, make_meshes
from forge_testing import run_on_ranks
from forge_testing.runs import fit_alone, make_job, together
from forge_train import JobError
from forge_train.jobs import load_model

pytestmark = pytest.mark.distributed

KEYS: dict[str, Any] = {
    "metrics.console": "off",
    "train.steps": 3,
    "model.num_layers": 2,
    "eval.sequences": 5,
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp_shard": (2, {}),
    "dp_replicate": (2, {"dp_replicate": 2}),
    "tp": (2, {"tp": 2}),
    "tp-whole-sequences": (2, {"tp": 2, "sequence_parallel": False}),
    "cp": (2, {"cp": 2}),
    "pp": (2, {"pp": 2}),
    "ep": (2, {"ep": 2}),
    "dp-tp": (4, {"tp": 2}),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a mixture, stored in bf16."""
    job = make_job(tmp_path_factory.mktemp("evaluated"))
    fit_alone(job, **KEYS, **{"model.moe.num_experts": 4, "model.moe.top_k": 2, "parallel.param_dtype": "bf16", "parallel.precision": "bf16"})  # fmt: skip
    return job.parent / "run"


def weights(run: Path, options: dict[str, Any], step: int | None = None) -> Any:
    from forge_testing.runs import Fitted

    parallel = ParallelConfig(device="cpu", precision="fp32", **options)
    try:
        model, _, at = load_model(run, step=step, parallel=parallel, meshes=make_meshes(parallel))
    except JobError as error:
        return Fitted(int(error.exit_code), 0, error.problems, {})
    assert not model.training
    named = model.named_parameters()
    whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in named}
    return Fitted(0, at, (), {n: p.detach() for n, p in whole.items()})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_reads_the_same_bits(run: Path, layout: str) -> None:
    world, options = LAYOUTS[layout]
    found = together(run_on_ranks(world, weights, run, options))
    wanted = dict(load_model(run)[0].named_parameters())
    assert found.keys() == wanted.keys()
    assert all(p.dtype == torch.float32 for p in found.values())
    assert all(torch.equal(found[n], wanted[n]) for n in wanted)
