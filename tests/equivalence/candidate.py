"""A cell on its ranks: the step of the runner, from the public parts of the packages."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from batches import ROWS, SEQ, STEPS, MicroBatch, batches, filler, together
from cells import FEATURES, LAYOUTS, Cell
from torch import Tensor, nn
from training import (
    ADAMW,
    MAX_NORM,
    SGD,
    STD,
    Run,
    build_model,
    gradients,
    mixtures,
    routes,
    weights,
)

from forge_core import (
    OptimizerConfig,
    build_optimizer,
    cross_entropy,
    fused_cross_entropy,
    initialise,
)
from forge_moe import expert_parallelize, recompute_contexts, set_aux_scale, update_expert_bias
from forge_parallel import (
    Meshes,
    ParallelConfig,
    accumulate,
    clip_grads_,
    global_count,
    global_grad_norm,
    make_meshes,
    parallelize,
    reshard,
)
from forge_parallel.axes import cut_sequence, vocab_cross_entropy
from forge_parallel.pipeline import Pipeline, sync_tied_gradients, tied_copies
from forge_resilience import nonfinite


def candidate(cell: Cell, mutation: str | None = None) -> Run:
    """What this rank of the cell's layout saw and holds."""
    from mutations import mutated  # it changes the names of this module

    with mutated(mutation):
        return _train(Side(cell), batches(cell))


def _train(side: Side, data: list[list[list[MicroBatch]]]) -> Run:
    cell, model, meshes = side.cell, side.model, side.meshes
    update = _Update(cell, model)
    run = Run(seed=cell.seed)
    for number, step in enumerate(data):
        if FEATURES[cell.feature].swaps and number:
            side.evaluate_others(step)
        loss = side.forward_backward(side.mine(step))
        norm, sums = global_grad_norm(side.counted, sums=loss[None])
        assert sums is not None
        run.losses.append(sums[0])
        run.gradients.append(gradients(model, cell))
        run.norms.append(norm)
        run.routes.append(routes(model))
        clip_grads_(model.parameters(), norm, MAX_NORM)
        skip = nonfinite(sums[0], norm)
        update(skip)
        update_expert_bias(model, number, STEPS, groups=meshes.stage.group or (), skip=skip)
    if FEATURES[cell.feature].evaluated:
        run.losses.append(side.evaluate(data[-1]))
    run.weights = weights(model)
    return run


class Side:
    """The cell's model in its layout, and the way of a step through it. ValueError where it is refused."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        config = parallel_config(cell)
        self.meshes = _meshes(_axes_of(config))
        with torch.device("meta"):
            self.model: Any = build_model(cell, aux="attach")
        if config.ep > 1:
            expert_parallelize(self.model, self.meshes.sparse["ep"])
        experts = bool(mixtures(self.model))
        contexts = recompute_contexts if experts else None
        parallelize(
            self.model,
            config,
            self.meshes,
            seq_len=SEQ,
            recompute_contexts=contexts,
            compile_backend=FEATURES[cell.feature].backend,
        )
        self.pipeline: Any = None
        if config.pp > 1:
            self.pipeline = Pipeline(
                self.model,
                config,
                self.meshes,
                num_micro_batches=cell.micro_batches,
                micro_batch=ROWS,
                seq_len=SEQ,
                dim=self.model.config.dim,
            )
        initialise(self.model, _seed(cell, self.meshes), **STD)
        twice = tied_copies(self.model, self.meshes) if config.pp > 1 else set()
        self.counted = [p for p in self.model.parameters() if p not in twice]
        self._join_mixtures()

    def _join_mixtures(self) -> None:
        """What the runner tells mixtures of their ranks."""
        meshes = self.meshes
        rows = tuple(axis.group for axis in (meshes.cp, meshes.tp) if axis.size > 1)
        for layer in mixtures(self.model).values():
            layer.data_group = meshes.stage.group or ()
            layer.sequence_group = rows or None
        cell = self.cell
        parts = FEATURES[cell.feature].total or cell.micro_batches * LAYOUTS[cell.layout].readers
        set_aux_scale(self.model, torch.tensor(1 / parts))

    def mine(self, step: list[list[MicroBatch]]) -> list[MicroBatch]:
        """This rank's micro-batches; one may stand for several (see compare.py): it takes all of theirs.
        Where they do not divide, filler follows."""
        share = len(step) // self.meshes.batch_size
        first = self.meshes.batch_rank * share
        parts = [part for rank in step[first : first + share] for part in rank]
        if FEATURES[self.cell.feature].total is None:
            return parts
        missing = self.cell.micro_batches * share - len(parts)
        return [*map(_with_documents, parts), *(filler() for _ in range(missing))]

    @torch.no_grad()
    def evaluate(self, step: list[list[MicroBatch]]) -> Tensor:
        """Mean loss of all ranks' rows in eval mode, of data and expert ranks."""
        parts = self.mine(step)
        self.model.eval()
        losses = [self._token_loss(self.model(p.tokens, **p.keywords), p.labels) for p in parts]
        count = torch.tensor(float(sum(part.num_valid for part in parts)))
        total = torch.stack([torch.stack(losses).sum(), count])
        dist.all_reduce(total)
        return total[0] / total[1]

    @torch.no_grad()
    def evaluate_others(self, step: list[list[MicroBatch]]) -> None:
        """An evaluation with other weights, which are put in and taken out in place."""
        parameters = list(self.model.parameters())  # held, as an optimizer does
        own = [parameter.detach().clone() for parameter in parameters]
        for parameter in parameters:
            parameter.mul_(2.0)
        parts = [self._here(part) for part in self.mine(step)]
        if self.pipeline is not None:
            whole = together(parts)
            self.pipeline.evaluate(whole.tokens, whole.labels, self._token_loss, **whole.keywords)
        for part in parts if self.pipeline is None else ():
            self.model(part.tokens, **part.keywords)
        reshard(self.model)
        for parameter, value in zip(parameters, own, strict=True):
            parameter.copy_(value)

    def forward_backward(self, parts: list[MicroBatch]) -> Tensor:
        """This rank's share of the step's loss; gradients are those of the whole step."""
        count = sum(part.num_valid for part in parts) * self.meshes.speaks
        labels = global_count(count, self.meshes)
        parts = [self._here(part) for part in parts]
        total = torch.zeros(())
        if self.pipeline is not None:
            whole = together(parts)
            loss_of = lambda logits, wanted: self._token_loss(logits, wanted) / labels  # noqa: E731
            then = _fused if FEATURES[self.cell.feature].fused else None
            total = self.pipeline.step(
                whole.tokens, whole.labels, loss_of, then=then, **whole.keywords
            )
            sync_tied_gradients(self.model, self.meshes)
            parts = []
        for index, part in enumerate(parts):
            last = index == len(parts) - 1
            accumulate(self.model, last)
            if FEATURES[self.cell.feature].deferred:
                self.model.set_requires_gradient_sync(last)
            loss = self._forward(part) / labels
            loss.backward()
            total += loss.detach()
        # ranks of a tp group have the same loss
        return total if self.meshes.tp.rank == 0 else torch.zeros(())

    def _forward(self, part: MicroBatch) -> Tensor:
        """The sum of token losses of a micro-batch."""
        given: dict[str, Any] = dict(part.keywords)
        if FEATURES[self.cell.feature].fused:
            given["then"] = functools.partial(_fused, labels=part.labels)
        return self._token_loss(self.model(part.tokens, **given), part.labels)

    def _here(self, part: MicroBatch) -> MicroBatch:
        """This rank's tokens of each row."""
        if self.meshes.cp.size == 1:
            return part
        positions = (
            torch.arange(SEQ).expand(ROWS, SEQ) if part.positions is None else part.positions
        )
        whole = MicroBatch(part.tokens, part.labels, positions, part.document_ids)
        return whole.map(lambda x: cut_sequence(x, self.meshes.cp))

    def _token_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        if FEATURES[self.cell.feature].fused:
            return logits  # the head gave the loss
        if self.meshes.tp.size > 1:
            return vocab_cross_entropy(logits, labels, self.meshes.tp)[0]
        return cross_entropy(logits, labels).sum


def _fused(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return fused_cross_entropy(x, weight, labels).sum


def _with_documents(part: MicroBatch) -> MicroBatch:
    """Rows of one document each, where none were said: filler has its ids, and all parts have the same keys."""
    if part.document_ids is not None:
        return part
    positions = torch.arange(SEQ).repeat(ROWS, 1)
    return MicroBatch(part.tokens, part.labels, positions, torch.zeros_like(positions))


class _Update:
    """torch's SGD, or Forge's AdamW with its mask."""

    def __init__(self, cell: Cell, model: nn.Module) -> None:
        self._masked = cell.optimizer == "adamw"
        if self._masked:
            self._optimizer: Any = build_optimizer(model, OptimizerConfig(**ADAMW))
        else:
            self._optimizer = torch.optim.SGD(model.parameters(), **SGD)

    def __call__(self, skip: Tensor) -> None:
        self._optimizer.step(skip=skip) if self._masked else self._optimizer.step()
        self._optimizer.zero_grad()


def parallel_config(cell: Cell) -> ParallelConfig:
    layout = LAYOUTS[cell.layout]
    axes = layout.keys if dist.get_world_size() == layout.world else {}
    return ParallelConfig(
        **{"device": "cpu", "precision": "fp32", **axes, **FEATURES[cell.feature].parallel}
    )


def _axes_of(config: ParallelConfig) -> ParallelConfig:
    """What meshes are made of."""
    names = ("device", "precision", "cpu_offload", "dp_replicate", "tp", "cp", "pp", "ep")
    return ParallelConfig(**{name: getattr(config, name) for name in names})


@functools.cache
def _meshes(config: ParallelConfig) -> Meshes:
    """Once per process: groups cost threads and sockets."""
    return make_meshes(config)


def _seed(cell: Cell, meshes: Meshes) -> int:
    return cell.seed
