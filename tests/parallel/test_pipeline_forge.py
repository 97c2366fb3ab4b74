"""Forge's decoder, dense and as a mixture, in pipeline stages: the numbers of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from forge_core import cross_entropy
from forge_core.model import Transformer, TransformerConfig
from forge_moe import MoE, MoEConfig, recompute_contexts, set_aux_scale, update_expert_bias
from forge_parallel import ParallelConfig, global_grad_norm, make_meshes, parallelize
from forge_parallel.pipeline import Pipeline, sync_tied_gradients, tied_copies
from forge_testing import device, run_on_ranks

pytestmark = pytest.mark.distributed

V, D, S, ROWS, VALID = 53, 16, 12, 8, 77.0
KINDS = ("dense", "qk_norm", "tied", "moe")
SCHEDULES = ("1f1b", "interleaved_1f1b", "zbv_zero_bubble")
CASES = [(k, s, "none") for k in KINDS for s in SCHEDULES if (k, s) != ("tied", "zbv_zero_bubble")]
CASES += [("moe", s, "full") for s in ("1f1b", "zbv_zero_bubble", "dualpipev")]


def build(kind: str) -> Transformer:
    config = TransformerConfig(
        vocab_size=V,
        dim=D,
        num_layers=5,
        num_heads=2,
        num_kv_heads=1,
        max_seq_len=S,
        qk_norm=kind == "qk_norm",
        tie_embeddings=kind == "tied",
    )
    experts = MoEConfig(
        dim=D,
        hidden_dim=8,
        num_experts=4,
        top_k=2,
        num_shared_experts=1,
        aux="attach",
        aux_loss_weight=0.1,
        sequence_loss_weight=0.1,
        z_loss_weight=0.01,
        bias_update_rate=1e-2,
    )
    return Transformer(config, feed_forward=(lambda _: MoE(experts)) if kind == "moe" else None)


def batch(step: int) -> dict[str, Tensor]:
    """Rows of two to four documents, some labels ignored; each (ROWS, S)."""
    g = torch.Generator().manual_seed(step)
    tokens, labels = torch.randint(0, V, (2, ROWS, S), generator=g)
    labels[torch.rand(ROWS, S, generator=g) < 0.3] = -100
    documents = (torch.rand(ROWS, S, generator=g) < 0.25).long().cumsum(1)
    found = {"tokens": tokens, "labels": labels, "document_ids": documents}
    return {name: tensor.to(device()) for name, tensor in found.items()}


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits, labels).sum / VALID


def whole(value: Any) -> Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def state_of(model: Transformer) -> dict[str, Tensor]:
    return {name: whole(value) for name, value in model.state_dict().items()}


def one_process(kind: str) -> dict[str, Any]:
    model, losses, found = build(kind), [], {}
    set_aux_scale(model, torch.tensor(1 / ROWS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        data = batch(step)
        parts = [{n: v[i : i + 1] for n, v in data.items()} for i in range(ROWS)]
        total = torch.zeros(())
        for part in parts:
            loss = loss_of(model(part["tokens"], document_ids=part["document_ids"]), part["labels"])
            loss.backward()
            total += loss.detach()
        losses.append(total)
        if step == 0:
            found = {n: whole(p.grad) for n, p in model.named_parameters()}
            norm = torch.stack([g.norm() for g in found.values()]).norm()
        optimizer.step()
        optimizer.zero_grad()
        update_expert_bias(model, step, 2, ())
    data = batch(2)
    with torch.no_grad():
        model.eval()
        losses.append(
            loss_of(model(data["tokens"], document_ids=data["document_ids"]), data["labels"])
        )
    return {"losses": losses, "norm": norm, "grads": found, "state": state_of(model)}


def train(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    config = ParallelConfig(device=device().type, precision="fp32", pp=2, **options)
    meshes = make_meshes(config)
    model = build(kind)
    parallelize(model, config, meshes, seq_len=S, recompute_contexts=recompute_contexts)
    set_aux_scale(model, torch.tensor(1 / ROWS, device=device()))
    pipeline = Pipeline(
        model,
        config,
        meshes,
        num_micro_batches=ROWS // meshes.batch_size,
        micro_batch=1,
        seq_len=S,
        dim=D,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, found, copies = [], {}, tied_copies(model, meshes)
    for step in range(3):
        data = {n: v.chunk(meshes.batch_size)[meshes.batch_rank] for n, v in batch(step).items()}
        model.train(step < 2)
        run = pipeline.step if step < 2 else pipeline.evaluate
        loss = run(data["tokens"], data["labels"], loss_of, document_ids=data["document_ids"])
        if step < 2:
            sync_tied_gradients(model, meshes)
        counted = [p for p in model.parameters() if p not in copies]
        norm, total = global_grad_norm(counted, sums=loss.reshape(1))
        losses.append(total[0])
        if step == 0:
            found = {n: whole(p.grad) for n, p in model.named_parameters()}
            first_norm = norm
        if step < 2:
            optimizer.step()
            optimizer.zero_grad()
            update_expert_bias(
                model, step, 2, () if meshes.stage.group is None else meshes.stage.group
            )
    return {"losses": losses, "norm": first_norm, "grads": found, "state": state_of(model)}


def errors(ranks: list[dict[str, Any]], wanted: dict[str, Any]) -> dict[str, float]:
    """Relative error of each tensor over all ranks; every parameter must be on some rank."""
    found: dict[str, float] = {}
    for rank in ranks:
        pairs = {"norm": (rank["norm"], wanted["norm"])}
        pairs |= {
            f"loss {i}": p for i, p in enumerate(zip(rank["losses"], wanted["losses"], strict=True))
        }
        for kind in ("grads", "state"):
            pairs |= {f"{kind} {n}": (v, wanted[kind][n]) for n, v in rank[kind].items()}
        for name, (a, b) in pairs.items():
            far = float(
                (a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-12)
            )
            found[name] = max(far, found.get(name, 0.0))
    assert {n for r in ranks for n in r["grads"]} == set(wanted["grads"])
    assert {n for r in ranks for n in r["state"]} == set(wanted["state"])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "schedule", "recompute"), CASES)
def test_F10_F11_stages_compute_what_one_process_computes(
    kind: str, schedule: str, recompute: str
) -> None:
    """Loss, norm, gradients, weights after two updates, evaluation; biases of experts, router losses."""
    options = {"pp_schedule": schedule, "recompute": recompute}
    ranks = run_on_ranks(4, train, kind, options)
    off = {name: e for name, e in errors(ranks, one_process(kind)).items() if e > 1e-5}
    assert not off
