"""A decoder with pictures in every layout has the loss and gradients of one process; rows without pictures among them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from image_models import AXES, LAYOUTS, Pictures, S, alone, build, covering, step
from torch import Tensor, nn

from forge_data import Loader
from forge_parallel import ParallelConfig, make_meshes, parallelize
from forge_parallel.check_model import extra_problems
from forge_parallel.pipeline import parts_of
from forge_testing import RankError, run_on_ranks
from forge_testing.problems import rejects
from forge_testing.runs import make_job
from forge_train import load_job

pytestmark = [pytest.mark.distributed, pytest.mark.lane("test")]


def cases() -> list[Any]:
    """The cases of `covering()`; a compiled layout is in the lane `ci` for one kind."""
    found = []
    for kind, layout in covering():
        own = [pytest.mark.needs_torch("2.13")] if LAYOUTS[layout].new_schedule else []
        if kind == "cross" or not LAYOUTS[layout].keys.get("compile"):
            own.append(pytest.mark.lane("ci"))
        found.append(pytest.param(kind, layout, id=f"{kind}/{layout}", marks=own))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), cases())
def test_loss_and_gradients_are_those_of_one_process(
    tmp_path: Path, kind: str, layout: str
) -> None:
    """F75: ranks without a picture run the encoder all the same, and its gradients are reduced."""
    chosen, (loss, wanted, parameters) = LAYOUTS[layout], alone(kind)
    told = run_on_ranks(
        chosen.world, step, make_job(tmp_path), kind, chosen.keys, chosen.micro_batch
    )
    assert sum(part for part, _ in told) == pytest.approx(loss, rel=1e-5)
    found: dict[str, Tensor] = {}
    for _, mine in told:
        found |= mine
    for name, gradient in wanted.items():
        if name.endswith("k_proj.bias"):  # the softmax leaves it without one
            assert found[name].abs().max() < 1e-8
            continue
        bound = 1e-4 if gradient.numel() == 1 else 1e-5  # of a gate: one sum whose terms cancel
        assert (found[name] - gradient).abs().max() <= bound * gradient.abs().max(), name
    assert kind == "clip" or len(wanted) == parameters


def test_every_kind_meets_its_axes_and_every_layout_is_met() -> None:
    for kind, axes in AXES.items():
        met = {a for own, name in covering() if own == kind for a in LAYOUTS[name].axes}
        assert set(axes.split()) <= met, kind
    assert {name for _, name in covering()} == LAYOUTS.keys()


def units_of_encoder(kind: str, dtype: torch.dtype) -> tuple[list[bool], set[str], float]:
    """On a rank, with a frozen encoder of `dtype`: whether its blocks are sharded while the decoder runs, the dtypes of
    its shards, and the largest gradient of the adapter."""
    config = ParallelConfig(device="cpu", precision="fp32")
    model = build(kind)
    model.vision.requires_grad_(False).to(dtype)
    parallelize(model, config, make_meshes(config), seq_len=S)
    seen: list[bool] = []

    def look(*_: Any) -> None:
        held = (p for block in model.sharding_units() for p in block.parameters())
        seen.extend(hasattr(p, "device_mesh") for p in held)

    model.layers["1"].register_forward_pre_hook(look)
    batch = next(Loader(Pictures(kind), 2))
    media = {name: batch.extras[name] for name in model.extra_inputs if name in batch.extras}
    out = model(batch.tokens, batch.positions, batch.document_ids, **media)
    out.square().mean().backward()
    dtypes = {str(p.dtype) for p in model.vision.parameters()}
    return (
        seen,
        dtypes,
        max(float(p.grad.full_tensor().abs().max()) for p in model.adapter.parameters()),
    )


@pytest.mark.lane("quick")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["plain", "clip", "shapes"])
def test_a_frozen_encoder_is_sharded_by_block_in_its_dtype(kind: str, dtype: torch.dtype) -> None:
    """And the root does not hold it while the decoder runs."""
    for seen, dtypes, gradient in run_on_ranks(2, units_of_encoder, kind, dtype):
        assert len(seen) > 8
        assert all(seen)
        assert dtypes == {str(dtype)}
        assert gradient > 0.0


def test_context_and_tensor_parallelism_together_are_rejected(tmp_path: Path) -> None:
    config = load_job(make_job(tmp_path)).config
    layout = replace(config.parallel, cp=2, tp=2).axes(4)
    (problem,) = extra_problems(build(), Loader(Pictures(), 4).filler(1), layout)
    assert (problem.key, problem.value, problem.code) == ("parallel.cp", 2, "tp")


def test_masks_of_full_sequences_are_rejected_where_cp_splits_them(tmp_path: Path) -> None:
    config = load_job(make_job(tmp_path)).config
    layout = replace(config.parallel, cp=2).axes(2)
    batch = Loader(Pictures("tree"), 4).filler(1)
    (problem,) = extra_problems(build("tree"), batch, layout)
    assert (problem.key, problem.value, problem.code) == ("parallel.cp", 2, "mask_inputs")
    assert "branch_ids" in problem.rule
    (problem,) = extra_problems(nn.Linear(2, 2), batch, layout)
    assert (problem.key, problem.code) == ("model.name", "branches")
    with pytest.raises(RankError, match=r"image_ids of VLM"):
        run_on_ranks(2, step, make_job(tmp_path), "ahead", {"cp": 2}, 4)


def test_cross_attention_in_stages_of_a_pipeline_is_rejected() -> None:
    with rejects("pipeline_parts", ..., "unsupported", where="fusion.name 'cross_attention'"):
        parts_of(build("cross"))


@pytest.mark.slow
def test_features_of_more_layers_than_a_stage_has_are_rejected(tmp_path: Path) -> None:
    keys = {"pp": 2, "pp_schedule": "zbv_zero_bubble"}
    with pytest.raises(RankError, match=r"features\.layers 2 .* 1\b"):
        run_on_ranks(2, step, make_job(tmp_path), "deep", keys, 2)


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_expert_choice_is_rejected_where_cp_splits_sequences(
    tmp_path: Path,
) -> None:
    with pytest.raises(RankError, match=r"fusion\.moma\.router 'expert_choice'"):
        run_on_ranks(2, step, make_job(tmp_path), "chosen", {"cp": 2}, 4)
