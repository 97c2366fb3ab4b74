"""A small model that can be cut into stages, one step of it on a rank, and the same in one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from forge_parallel import ParallelConfig, clip_grads_, global_grad_norm, make_meshes, materialize
from forge_parallel.axes.fsdp import apply_fsdp
from forge_parallel.compile import compile_blocks
from forge_parallel.pipeline import (
    Pipeline,
    keeps_gathered,
    split,
    sync_tied_gradients,
    tied_copies,
)
from forge_testing import device

V, D, S = 37, 16, 6  # vocabulary, width, tokens of a row
VALID = 101.0  # labels of the step: some number that no shape has


class Block(nn.Module):
    """x + a feed-forward of x and the mean of its document so far."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(D),
            nn.Linear(2 * D, 3 * D),
            nn.Linear(3 * D, D),
        )
        self.recompute, self.calls = recompute, 0

    def forward(self, x: Tensor, document_ids: Tensor | None) -> Tensor:
        self.calls += 1
        if self.recompute:
            return checkpoint(self.body, x, document_ids, use_reentrant=False)
        return self.body(x, document_ids)

    def body(self, x: Tensor, document_ids: Tensor | None) -> Tensor:
        h = self.norm(x)
        seen = x.new_ones(x.size(1), x.size(1)).tril()
        if document_ids is not None:
            seen = seen * (document_ids.unsqueeze(2) == document_ids.unsqueeze(1))
        mean = seen @ h / seen.sum(-1, keepdim=True)  # (B, S, D)
        return x + self.down(F.gelu(self.up(torch.cat([h, mean], -1))))


class Net(nn.Module):
    """Embedding, blocks, norm and head; tied, the head is the embedding's table."""

    def __init__(self, layers: int = 8, *, tied: bool = False, recompute: bool = False) -> None:
        super().__init__()
        self.tied = tied
        self.embedding, self.place = nn.Embedding(V, D), nn.Embedding(S, D)
        self.layers = nn.ModuleList([Block(recompute) for _ in range(layers)])
        self.norm = nn.LayerNorm(D)
        self.head = None if tied else nn.Linear(D, V, bias=False)

    def pipeline_parts(self) -> dict[str, Any]:
        out = ("embedding",) if self.tied else ("head",)
        return {"first": ("embedding", "place"), "blocks": "layers", "last": ("norm", *out)}

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(
        self, x: Tensor, positions: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Tensor:
        if not x.is_floating_point():
            places = (
                torch.arange(x.size(1), device=x.device).expand_as(x)
                if positions is None
                else positions
            )
            x = self.embedding(x) + self.place(places)
        for block in self.layers:
            x = block(x, document_ids)
        if self.norm is None:
            return x
        return (
            F.linear(self.norm(x), self.embedding.weight) if self.tied else self.head(self.norm(x))
        )


def net(**kind: Any) -> Net:
    torch.manual_seed(0)
    return Net(**kind)


def batch(rows: int, seed: int) -> dict[str, Tensor]:
    """tokens, labels (some ignored), positions and document_ids, each (rows, S)."""
    g = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(0, V, (2, rows, S), generator=g)
    labels[torch.rand(rows, S, generator=g) < 0.3] = -100
    borders = torch.rand(rows, S, generator=g) < 0.3
    documents = borders.long().cumsum(1)
    positions = torch.randint(0, S, (rows, S), generator=g)
    found = {"tokens": tokens, "labels": labels, "positions": positions, "document_ids": documents}
    return {name: tensor.to(device()) for name, tensor in found.items()}


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum") / VALID


def whole(tensor: Any) -> Tensor:
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().clone()


def gradient(parameter: Tensor) -> Tensor:
    return torch.zeros(()) if parameter.grad is None else whole(parameter.grad)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def one_process(rows: int, keywords: bool = True, **kind: Any) -> dict[str, Any]:
    """What `train` must give, from plain loops over rows."""
    model = net(**kind)
    optimizer, found = sgd(model), {}
    for step in range(2):
        data = batch(rows, step)
        loss = torch.zeros(())
        for i in range(rows):
            row = {name: value[i : i + 1] for name, value in data.items()}
            labels = row.pop("labels")
            tokens = row.pop("tokens")
            part = loss_of(model(tokens, **(row if keywords else {})), labels)
            part.backward()
            loss += part.detach()
        if step == 0:
            found = {"loss": loss, "grads": {n: whole(p.grad) for n, p in model.named_parameters()}}
            found["norm"] = torch.stack([g.norm() for g in found["grads"].values()]).norm()
        optimizer.step()
        optimizer.zero_grad()
    data = batch(rows, 2)
    labels = data.pop("labels")
    with torch.no_grad():
        found["evaluated"] = loss_of(model(data.pop("tokens"), **data), labels)
    return found | {"weights": {n: whole(p) for n, p in model.named_parameters()}}


def prepare(
    options: dict[str, Any],
    kind: dict[str, Any],
    rows: int,
    micro_batch: int = 1,
    meta: bool = False,
    reshard: bool | None = None,
    dtype: torch.dtype = torch.float32,
    compiled: bool = False,
) -> tuple[Net, Pipeline, Any]:
    """The part of this rank, its pipeline, its meshes."""
    precision = "fp32" if dtype == torch.float32 else "bf16"
    config = ParallelConfig(device=device().type, precision=precision, **options)  # type: ignore[arg-type]
    meshes = make_meshes(config)
    model = net(**kind)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    model = model.to("meta") if meta else model
    stages = split(model, config, meshes, seq_len=S)
    keep = keeps_gathered(config) if reshard is None else not reshard
    mesh = meshes.fsdp(meshes.dense)
    for stage in stages:
        if compiled:
            compile_blocks(stage, "aot_eager")
        apply_fsdp(stage, mesh, compute_dtype=dtype, reshard_after_forward=not keep)
    materialize(model, meshes.device)
    if meta:
        fill(model, values)
    mine = rows // meshes.batch_size
    shape = {"micro_batch": micro_batch, "seq_len": S, "dim": D}
    pipeline = Pipeline(model, config, meshes, num_micro_batches=mine // micro_batch, **shape)
    return model, pipeline, meshes


def rows_of(meshes: Any, rows: int, seed: int) -> dict[str, Tensor]:
    """What this rank reads of a batch."""
    return {n: v.chunk(meshes.batch_size)[meshes.batch_rank] for n, v in batch(rows, seed).items()}


def train(*setting: Any) -> dict[str, Any]:
    """Two steps and an evaluation of a rank (see `prepare`), everything that can be compared."""
    rows: int = setting[2]
    model, pipeline, meshes = prepare(*setting)
    optimizer, found = sgd(model), {"forwards": []}
    once = float(meshes.tp.rank == 0)  # ranks of a tp group have the same numbers here
    for step in range(2):
        data = rows_of(meshes, rows, step)
        calls = {name: block.calls for name, block in model.layers.named_children()}
        loss = pipeline.step(data.pop("tokens"), data.pop("labels"), loss_of, **data)
        found["forwards"].append([b.calls - calls[n] for n, b in model.layers.named_children()])
        sync_tied_gradients(model, meshes)
        if step == 0:
            copies = tied_copies(model, meshes)
            counted = [p for p in model.parameters() if p not in copies]
            norm, total = global_grad_norm(counted, sums=loss.reshape(1) * once)
            found |= {"norm": norm / meshes.tp.size**0.5, "loss": total[0], "own": loss}
            found["grads"] = {n: gradient(p) for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    data = rows_of(meshes, rows, 2)
    own = pipeline.evaluate(data.pop("tokens"), data.pop("labels"), loss_of, **data)
    found["modes"] = [m.training for stage in pipeline.stages.values() for m in stage.modules()]
    found["evaluated"] = global_grad_norm([], sums=own.reshape(1) * once)[1][0]
    # asked before state_dict, which would shard them itself
    found["sharded"] = all(isinstance(p, DTensor) for p in model.parameters())
    state = model.state_dict()
    found["has_last"] = pipeline.has_last
    return found | {"weights": {name: whole(value) for name, value in state.items()}}


def clipped(options: dict[str, Any], rows: int, part: float) -> dict[str, Any]:
    """Gradients after clipping to a part of their norm, that of this rank's alone, and of all."""
    model, pipeline, meshes = prepare(options, {}, rows)
    data = rows_of(meshes, rows, 0)
    pipeline.step(data.pop("tokens"), data.pop("labels"), loss_of, **data)
    norm, _ = global_grad_norm(model.parameters())
    own = torch.stack([gradient(p).norm() for p in model.parameters()]).norm()
    clip_grads_(model.parameters(), norm, float(norm) * part)
    return {
        "norm": norm,
        "own": own,
        "grads": {n: gradient(p) for n, p in model.named_parameters()},
    }


def evaluate_first(options: dict[str, Any], rows: int) -> dict[str, Any]:
    """An evaluation before any step, one of fewer rows, a step, another evaluation."""
    model, pipeline, _ = prepare(options, {}, rows)
    found = {}
    for name, count, seed in (("before", rows, 0), ("fewer", 1, 1), ("after", rows, 0)):
        if name == "after":
            data = batch(rows, 0)
            loss = pipeline.step(data.pop("tokens"), data.pop("labels"), loss_of, **data)
            found["step"] = global_grad_norm([], sums=loss.reshape(1))[1]
        data = batch(count, seed)
        own = pipeline.evaluate(data.pop("tokens"), data.pop("labels"), loss_of, **data)
        found[name] = global_grad_norm([], sums=own.reshape(1))[1]
    return found | {
        "training": model.training,
        "grads": len([p for p in model.parameters() if p.grad is not None]),
    }


def fill(model: nn.Module, values: dict[str, Tensor]) -> None:
    """Give a materialized model its values by name."""
    from torch.distributed.tensor import distribute_tensor

    with torch.no_grad():
        for name, p in model.named_parameters():
            shard: Any = distribute_tensor(values[name].to(device()), p.device_mesh, p.placements)
            p.to_local().copy_(shard.to_local())


def error(ranks: list[dict[str, Any]], wanted: dict[str, Any]) -> float:
    """The worst relative error over loss, norm, evaluation, gradients and weights of all ranks."""
    worst = 0.0
    for rank in ranks:
        pairs = [(rank[k], wanted[k]) for k in ("loss", "norm", "evaluated")]
        for kind in ("grads", "weights"):
            pairs += [(value, wanted[kind][name]) for name, value in rank[kind].items()]
        worst = max([worst, *(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)])
    names = {name for rank in ranks for name in rank["grads"]}
    assert names == set(wanted["grads"]), "parameters that no stage has"
    return worst
