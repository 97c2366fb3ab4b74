"""Mixtures of experts through the runner: the numbers of one process on any layout, and their metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core import generate
from forge_moe import MoE, MoEConfig, aux_losses
from forge_testing import runs
from forge_testing.problems import rejects
from forge_train import Callback, ConfigError, Trainer, load_job, load_trained, read_run
from forge_train.build.build import build_model
from forge_train.build.layout import layout_problems
from forge_train.build.run_directory import RunDirectory
from forge_train.jobs import _build

pytestmark = [pytest.mark.distributed, pytest.mark.lane("test")]

MOE = """
[model.moe]
num_experts = 8
width_multiplier = 0.5
num_shared_experts = 1
bias_update_rate = 1e-3
sequence_loss_weight = 1e-2
z_loss_weight = 1e-3
"""
#: Nodes of two ranks, between which rows go once.
HIERARCHICAL = {
    "parallel__ep": 4,
    "parallel__across_nodes": True,
    "model__moe__dispatcher": "hierarchical",
    "LOCAL_WORLD_SIZE": 2,
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One process, undisturbed."""
    job = runs.make_job(tmp_path_factory.mktemp("alone"), MOE)
    fitted = runs.fit_reference(job)
    return runs.columns(job), fitted, read_run(job.parent / "run").metrics


def test_F147_router_losses_do_not_depend_on_micro_batches_of_rows_with_padding(
    tmp_path: Path,
) -> None:
    """Micro-batches of two rows and of all; the layouts are in tests/equivalence."""
    found = []
    for rows in (2, 12):
        job = runs.make_job(tmp_path / str(rows), "[model.moe]\nnum_experts = 4\n")
        keys = {"data.sources.text.name": "tests.use.test_fused_loss:Padded", "model.vocab_size": 64,
                "model.moe.z_loss_weight": 1.0, "train.steps": 2, "train.micro_batch": rows,
                "eval.every_steps": 0, "checkpoint.every_steps": 0, "sample.max_new_tokens": 0}  # fmt: skip
        found.append(runs.fit_reference(job, **keys).weights)
    runs.assert_close(*found)


@pytest.mark.slow
def test_F02_rows_that_cross_nodes_once_train_as_in_one_process(tmp_path: Path, alone: Any) -> None:
    """Other layouts of experts are in tests/equivalence; this one needs nodes."""
    job = runs.make_job(tmp_path, MOE)
    fitted = runs.fit_on_ranks(4, job, **HIERARCHICAL)
    runs.assert_close(runs.together(fitted), alone[1].weights)
    runs.assert_same_rows(runs.columns(job), alone[0])


@pytest.mark.slow
def test_F31_saved_with_experts_on_four_ranks_goes_on_with_them_on_one(
    tmp_path: Path, alone: Any
) -> None:
    job = runs.make_job(tmp_path, MOE)
    stopped = runs.fit_on_ranks(
        4, job, None, parallel__ep=4, train__steps=12, checkpoint__keep_last=9
    )
    assert [f.code for f in stopped] == [0] * 4
    for step in ("step-00000012", "step-00000009"):  # go back to step 6
        folder = tmp_path / "run/checkpoints" / step
        folder.rename(tmp_path / step)
    fitted = runs.fit_alone(job)
    runs.assert_same_rows(runs.columns(job), alone[0])
    runs.assert_close(fitted.weights, alone[1].weights)
    model, _, step = load_trained(tmp_path / "run")
    assert step == 12
    bias = dict(model.named_buffers())["layers.0.feed_forward.router.expert_bias"]
    assert bias.abs().max() > 0, "the bias was lost"


def test_metrics_show_biases_loads_and_drops_of_each_mixture(alone: Any) -> None:
    rows = alone[2]
    assert rows["moe.0.max_bias"][0] == pytest.approx(1e-3)
    assert 1e-3 < rows["moe.0.max_bias"][-1] <= 12e-3
    assert all(0 <= rate <= 1 for rate in rows["moe.0.drop_rate"])
    assert all(load >= 1 for load in rows["moe.0.max_load"])


def test_weights_in_fp32_on_a_gpu_are_read_without_kernels_of_16_bits(tmp_path: Path) -> None:
    """`generate` and `eval` refused runs whose experts multiply by grouped_mm or float8, which GPUs have in bf16 alone."""
    job = runs.make_job(tmp_path, MOE)
    runs.fit_alone(
        job, **{"model.moe.backend": "float8", "train.steps": 1, "metrics.console": "off"}
    )
    for kernels, backend in ((True, "float8"), (False, "auto")):
        model, config, _ = _build(RunDirectory(tmp_path / "run"), kernels)
        assert {m.config.backend for m in model.modules() if isinstance(m, MoE)} == {backend}
        assert config.model.moe.backend == "float8"


def test_layouts_that_do_not_fit_are_rejected(tmp_path: Path) -> None:
    job = runs.make_job(tmp_path, MOE)
    for ep, experts in ((3, 8), (4, 6), (2, 0)):
        overrides = {"parallel.ep": ep, "model.moe.num_experts": experts}
        (problem, *_) = layout_problems(load_job(job, overrides).config, 4)
        assert (problem.key, problem.code, problem.value) == ("parallel.ep", "divides", ep)
    choice = {"model.moe.router": "expert_choice", "model.moe.bias_update_rate": 0.0}
    with rejects("model.moe.router", "expert_choice", "generation", ConfigError) as refused:
        load_job(job, choice)
    assert len(refused.value.problems) == 1
    config = load_job(job, {**choice, "sample.max_new_tokens": 0}).config  # it scores rows
    with rejects("layers.0.feed_forward", ..., "needs_whole_rows"):
        generate(build_model(config.model, 0), [[1, 2, 3]], 2)
    with rejects("model.moe.num_experts", 8, "layers", ConfigError):
        load_job(job, {"model.moe.first_dense_layers": 1})
    with rejects("model.moe.top_k", 9, "above_experts", ConfigError):
        load_job(job, {"model.moe.top_k": 9})


class WatchRouter(Callback):
    """Fails the run unless the router's weight arrives unrounded and the experts' in bf16."""

    def on_start(self, trainer: Trainer) -> None:
        (layer,) = (m for m in trainer.model.modules() if isinstance(m, MoE))
        whole = layer.router.weight.full_tensor()  # type: ignore[attr-defined]
        logits, run = layer.router._logits, layer.experts.forward

        def watched(x: torch.Tensor) -> torch.Tensor:
            assert layer.router.weight.dtype == torch.float32
            if trainer.progress.step == 0:
                assert torch.equal(layer.router.weight, whole)
            return logits(x)

        def experts(*args: Any, **options: Any) -> torch.Tensor:
            assert layer.experts.up_proj.dtype == torch.bfloat16
            return run(*args, **options)

        layer.router._logits = watched  # type: ignore[method-assign]
        layer.experts.forward = experts  # type: ignore[method-assign]


@pytest.mark.slow
def test_bf16_keeps_the_router_in_fp32_and_is_near_fp32(tmp_path: Path, alone: Any) -> None:
    """With experts over two ranks, and each of these twice."""
    job = runs.make_job(tmp_path, MOE)
    fitted = runs.fit_on_ranks(4, job, WatchRouter, parallel__precision="bf16", parallel__ep=2)
    assert [f.code for f in fitted] == [0] * 4
    # routes near a tie may flip in bf16; over twelve steps of a tiny model the loss stays within 1 %
    assert runs.columns(job)["loss"] == pytest.approx(alone[0]["loss"], rel=1e-2)


@pytest.mark.slow
def test_an_evaluation_keeps_what_experts_counted(tmp_path: Path) -> None:
    """A row covers the training of its three steps, whether or not an evaluation followed the one before."""
    found = []
    for every in (3, 0):
        job = runs.make_job(tmp_path / str(every), MOE)
        runs.fit_alone(
            job, **{"metrics.console": "off", "metrics.every_steps": 3, "eval.every_steps": every}
        )
        rows = read_run(job.parent / "run").metrics
        found.append({name: rows[name] for name in rows if name.startswith("moe.")})
    assert found[0] == found[1]
    assert len(found[0]["moe.0.max_load"]) == 4


class NanInStep3(Callback):
    """Poisons a gradient, and keeps biases and choices as they are after each step."""

    seen: list[tuple[torch.Tensor, torch.Tensor]] = []  # noqa: RUF012  (emptied by the test)

    def on_start(self, trainer: Trainer) -> None:
        (layer,) = (m for m in trainer.model.modules() if isinstance(m, MoE))

        def poison(gradient: torch.Tensor) -> torch.Tensor:
            return gradient * float("nan") if trainer.progress.step == 2 else gradient

        layer.register_forward_hook(
            lambda module, args, y: y.register_hook(poison) and None if y.requires_grad else None
        )
        self.layer = layer

    def after_backward(self, step: int, batch: Any) -> None:
        assert self.layer.counters.step_counts is not None
        self.counts = self.layer.counters.step_counts.clone()

    def after_update(self, step: int, bad: torch.Tensor) -> None:
        self.seen.append((self.counts, self.layer.router.expert_bias.clone()))  # type: ignore[union-attr]


def test_a_skipped_step_keeps_the_biases_of_experts(tmp_path: Path) -> None:
    NanInStep3.seen.clear()
    job = runs.make_job(tmp_path, MOE)
    options = {"metrics.console": "off", "train.steps": 4, "train.max_skipped_steps": 2}
    trainer = Trainer(load_job(job, options), [NanInStep3()])
    trainer.fit()
    bias = torch.zeros(8)
    for step, (counts, found) in enumerate(NanInStep3.seen):
        if step != 2:
            bias = bias + 1e-3 * torch.sign(counts.sum() / 8 - counts)
        assert torch.allclose(found, bias, atol=1e-9), step
    assert counts.max() > counts.min()
    assert len(NanInStep3.seen) == 4


DEPENDENT = {
    "capacity": {"model.moe.capacity_factor": 0.5},
    "expert choice": {"model.moe.router": "expert_choice", "model.moe.bias_update_rate": 0.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", DEPENDENT)
def test_F91_val_loss_is_that_of_the_rows_on_any_ranks_and_micro_batches(
    tmp_path: Path, case: str
) -> None:
    """Seven rows, which two ranks do not divide, after a step that changes nothing."""
    options = {"train.steps": 1, "eval.every_steps": 1, "eval.sequences": 7, "optimizer.lr": 1e-12}
    options |= {"sample.max_new_tokens": 0, "checkpoint.every_steps": 1, **DEPENDENT[case]}
    options["model.moe.route_scale"] = 30.0  # experts weigh more than they do at the start
    losses = []
    for world, rows in ((1, 1), (1, 2), (1, 4), (2, 2)):
        job = runs.make_job(tmp_path / f"{world}-{rows}", MOE)
        fitted = runs.fit_on_ranks(world, job, None, **options, **{"train.micro_batch": rows})
        assert [f.code for f in fitted] == [0] * world
        losses.append(runs.columns(job)["val_loss"][-1])
    assert losses == pytest.approx(losses[:1] * len(losses), rel=1e-6)


@pytest.mark.parametrize("key", ["aux_loss_weight", "sequence_loss_weight", "z_loss_weight"])
def test_F23_the_weight_of_a_router_loss_counts_once(key: str) -> None:
    """Linear in its weight, equal to its definition at 1, and the same gradient when it attaches itself."""
    x = torch.randn(3, 7, 8, generator=torch.Generator().manual_seed(0))
    gradients, losses = {}, {}
    for aux, weight in (("return", 1.0), ("return", 0.25), ("attach", 0.25)):
        torch.manual_seed(0)
        layer = MoE(MoEConfig(dim=8, hidden_dim=8, num_experts=4, aux=aux, **{key: weight}))  # type: ignore[arg-type]
        with torch.no_grad():
            layer.router.weight.normal_(generator=torch.Generator().manual_seed(1))
        out = layer(x).sum() * 0.0
        if aux == "return":
            losses[weight] = aux_losses(layer).total
            out = out + losses[weight]
        out.backward()
        assert layer.router.weight.grad is not None
        gradients[aux, weight] = layer.router.weight.grad
    assert losses[0.25].item() == pytest.approx(0.25 * losses[1.0].item(), rel=1e-6)
    assert gradients["return", 1.0].abs().max() > 1e-3
    for other in (("return", 0.25), ("attach", 0.25)):
        assert torch.allclose(
            gradients[other], 0.25 * gradients["return", 1.0], rtol=1e-5, atol=1e-9
        )
    if key == "z_loss_weight":
        logits = x.view(-1, 8) @ layer.router.weight.t()
        wanted = logits.logsumexp(1).square().mean()
        assert losses[1.0].item() == pytest.approx(wanted.item(), rel=1e-5)
