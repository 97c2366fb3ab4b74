"""Ten steps of the runner beside a loop by hand that uses the leaves and nothing of the runner.

The loop has its own learning rates, micro-batches, clipping, optimizer and skipping; it asks for
router losses as terms, where the runner attaches them to the gradient. Step 4 has a gradient that is
not finite. fp32, relative to the largest element: 1e-5.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from forge_core import Transformer, TransformerConfig, initialize
from forge_data import Loader, PackedStream, SourceConfig, open_source
from forge_moe import MoE, MoEConfig, aux_losses, update_expert_bias
from forge_testing import write_job
from forge_train import Callback, Trainer, load_job, read_run

STEPS, POISONED, PEAK, FLOOR, WARMUP, MAX_NORM = 10, 4, 1e-2, 0.2, 3, 0.7
EXPERTS = {"num_experts": 4, "top_k": 2, "bias_update_rate": 1e-2, "sequence_loss_weight": 0.1}
JOB = {
    "run.seed": 5,
    "model.num_layers": 2,
    "train.tokens": STEPS * 4 * 32 - 31,  # rounds up to ten steps
    "train.micro_batch": 2,
    "train.max_grad_norm": MAX_NORM,
    "train.max_skipped_steps": 1,
    "optimizer.eps": 1e-4,  # with 1e-8 rounding noise becomes a full step
    "schedule.warmup_steps": WARMUP,
    "schedule.min_lr_ratio": FLOOR,
    "eval.every_steps": 3,
    "sample.max_new_tokens": 0,
}


def poison(parameter: nn.Parameter, step: Any) -> None:
    parameter.register_hook(lambda grad: grad * (math.nan if step() == POISONED else 1.0))


class Poison(Callback):
    def on_start(self, trainer: Any) -> None:
        poison(trainer.model.embedding.weight, lambda: trainer.progress.step + 1)


def factor(step: int) -> float:
    if step <= WARMUP:
        return step / WARMUP
    done = (step - WARMUP) / (STEPS - WARMUP)
    return FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * done)) / 2


def plain_loop(with_experts: bool) -> tuple[nn.Module, list[dict[str, float]]]:
    config = TransformerConfig(257, dim=16, num_layers=2, num_heads=2)
    experts = MoEConfig(dim=16, hidden_dim=64, **EXPERTS) if with_experts else None
    model = Transformer(config, feed_forward=None if experts is None else lambda _: MoE(experts))
    initialize(model, 5)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-4)
    loader = Loader(PackedStream(open_source(SourceConfig()), 32, seed=5), 4, 0, 1)
    step = 0
    poison(model.embedding.weight, lambda: step)
    rows = []
    for step in range(1, STEPS + 1):
        batch = next(loader)
        count, total = int((batch.labels != -100).sum()), 0.0
        for part in (slice(0, 2), slice(2, 4)):
            ids = batch.document_ids[part]
            logits = model(batch.tokens[part], batch.positions[part], ids)
            labels = batch.labels[part].flatten()
            loss = F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum") / count
            total += float(loss.detach())
            if experts is not None:
                loss = loss + aux_losses(model).total * 0.5  # two of four rows
            loss.backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        row = {"step": step, "lr": PEAK * factor(step), "loss": total, "grad_norm": norm}
        layers = [module for module in model.modules() if isinstance(module, MoE)]
        for index, layer in enumerate(layers):
            counts = layer.statistics(reset=True)["counts"].double()
            row[f"moe.{index}.max_load"] = float(counts.max() / counts.mean())
        for group in optimizer.param_groups:
            group["lr"] = row["lr"]
        skip = torch.tensor(float(not math.isfinite(norm)))
        if not skip:
            optimizer.step()
        update_expert_bias(model, step - 1, STEPS, skip=skip)
        optimizer.zero_grad()
        rows.append({**row, "tokens": step * 4 * 32})
    return model, rows


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_the_runner_equals_a_loop_by_hand(tmp_path: Path, kind: str) -> None:
    experts = kind == "experts"
    table = {f"model.moe.{key}": value for key, value in EXPERTS.items()} if experts else {}
    trainer = Trainer(load_job(write_job(tmp_path), {**JOB, **table}), [Poison()])
    assert trainer.total_steps == STEPS
    assert trainer.fit().step == STEPS
    model, wanted = plain_loop(experts)
    metrics = read_run(tmp_path / "run").metrics
    for name in wanted[0]:
        values = [row[name] for row in wanted]
        found = [math.nan if value is None else value for value in metrics[name]]
        assert found == pytest.approx(values, rel=1e-5, nan_ok=True), name
    assert not math.isfinite(wanted[POISONED - 1]["grad_norm"])
    state = trainer.model.state_dict()
    assert state.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert (state[name] - value).abs().max() <= 1e-5 * value.abs().max(), name
