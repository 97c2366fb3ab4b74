"""A cell on its ranks: the step of the runner, from the public parts of the packages."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
import torch.distributed as dist
from batches import ROWS, SEQ, STEPS, MicroBatch, batches, filler, together
from cells import AVERAGING, BY_NAME, FEATURES, LAYOUTS, Cell
from optimizers import Recorded, forges
from settings import set_up
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from training import (
    ADAMW,
    AHEAD_WEIGHT,
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
    initialize,
)
from forge_moe import expert_parallelize, recompute_contexts, set_aux_scale, update_expert_bias
from forge_parallel import (
    Meshes,
    ParallelConfig,
    clip_grads_,
    global_count,
    global_grad_norm,
    make_meshes,
    parallelize,
    reshard,
)
from forge_parallel.axes import (
    sharded_logits_vocab_size,
    vocab_cross_entropy,
    vocab_fused_cross_entropy,
)
from forge_parallel.compute import Compute
from forge_resilience import nonfinite
from forge_testing import device


def candidate(cell: Cell, mutation: str | None = None) -> Run:
    """What this rank of the cell's layout saw and holds."""
    from mutations import mutated  # it changes the names of this module

    set_up(cell.tf32)
    with mutated(mutation):
        return train(Side(cell), batches(cell))


def train(side: Side, data: list[list[list[MicroBatch]]]) -> Run:
    cell, model, meshes = side.cell, side.model, side.meshes
    update = _Update(cell, model)
    run = Run(seed=cell.seed)
    for number, step in enumerate(data):
        if FEATURES[cell.feature].swaps and number:
            side.evaluate_others(step)
        if cell.optimizer in AVERAGING:
            update.evaluate(side, step)
        side.set_tokens(step)
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
    if cell.optimizer in AVERAGING:
        update.switch(model, "eval")
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
        fused, terms = FEATURES[cell.feature].fused, FEATURES[cell.feature].terms
        self.compute = Compute(
            self.model,
            config,
            self.meshes,
            micro_batch=ROWS,
            num_micro_batches=cell.micro_batches,
            seq_len=SEQ,
            loss=functools.partial(_fused if fused else _cross_entropy, terms),
            sharded_loss=functools.partial(
                _sharded, fused, terms, sharded_logits_vocab_size(self.model), self.meshes
            ),
            in_head=fused,
            mtp_depths=FEATURES[cell.feature].ahead,
            mtp_weight=AHEAD_WEIGHT,
        )
        self.counted = self.compute.counted
        initialize(self.model, _seed(cell, self.meshes), **STD)
        self._join_mixtures()

    def _join_mixtures(self) -> None:
        """What the runner tells mixtures of their ranks."""
        meshes = self.meshes
        rows = tuple(axis.group for axis in (meshes.cp, meshes.tp) if axis.size > 1)
        for layer in mixtures(self.model).values():
            layer.data_group = meshes.stage.group or ()
            layer.sequence_group = rows or None

    def set_tokens(self, step: list[list[MicroBatch]]) -> None:
        """Weight router losses by the tokens of the step on all ranks."""
        tokens = sum(part.num_tokens for rank in step for part in rank)
        scale = torch.tensor(1 / tokens, device=self.meshes.device)
        set_aux_scale(self.model, scale, per_token=True)

    def mine(self, step: list[list[MicroBatch]]) -> list[MicroBatch]:
        """This rank's micro-batches; one may stand for several (see compare.py): it takes all of theirs.
        Where they do not divide, filler follows."""
        share = len(step) // self.meshes.batch_size
        first = self.meshes.batch_rank * share
        parts = [part for rank in step[first : first + share] for part in rank]
        if self.meshes.cp.size > 1:  # a row's positions do not count from 0 on each rank
            parts = [part.with_positions() for part in parts]
        if FEATURES[self.cell.feature].total is None:
            return parts
        missing = self.cell.micro_batches * share - len(parts)
        return [*map(_with_documents, parts), *(filler() for _ in range(missing))]

    @torch.no_grad()
    def evaluate(self, step: list[list[MicroBatch]]) -> Tensor:
        """Mean loss of all ranks' rows in eval mode, of data and expert ranks."""
        parts = self.mine(step)
        self.model.eval()
        losses = [self.compute.losses(part) for part in parts]
        count = torch.tensor(float(sum(part.num_valid for part in parts)), device=losses[0].device)
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
        for part in together(self.mine(step)).split(self.compute.sequences_at_once):
            self.compute.losses(part)
        reshard(self.model)
        for parameter, value in zip(parameters, own, strict=True):
            parameter.copy_(value)

    def forward_backward(self, parts: list[MicroBatch]) -> Tensor:
        """This rank's share of the step's loss; gradients are those of the whole step."""
        count = sum(part.num_valid for part in parts) * self.meshes.is_batch_leader
        labels = float(global_count(count, self.meshes))
        if FEATURES[self.cell.feature].deferred:
            _defer_gradient_sync(self.model, len(parts))
        return self.compute.gradients(together(parts), lambda: labels)[0]


def _defer_gradient_sync(model: Any, num_micro_batches: int) -> None:
    """As a loop of somebody's own does with FSDP2: gradients are summed over ranks in the last backward alone."""
    if not isinstance(model, FSDPModule):
        return  # one process has no gradients to sum over ranks
    forwards = itertools.count(1)

    def before(*_: Any) -> None:
        last = next(forwards) == num_micro_batches
        model.set_requires_gradient_sync(last)
        if last:
            hook.remove()

    hook = model.register_forward_pre_hook(before)


def _cross_entropy(
    terms: dict[str, Any], logits: Tensor, labels: Tensor, weights: Tensor | None
) -> Tensor:
    return cross_entropy(logits, labels, weights=weights, **terms).sum


def _fused(
    terms: dict[str, Any], x: Tensor, weight: Tensor, *targets: Any, **head: float
) -> Tensor:
    labels, weights = targets
    return fused_cross_entropy(x, weight, labels, weights=weights, **terms, **head).sum


def _sharded(
    fused: bool,
    terms: dict[str, Any],
    ids: int | None,
    meshes: Meshes,
    *given: Any,
    **head: float,
) -> Tensor:
    """The same of a tp rank's logits, or of its rows of the head's weight."""
    *parts, labels, weights = given
    loss: Any = vocab_fused_cross_entropy if fused else vocab_cross_entropy
    found = loss(*parts, labels, meshes.tp, weights=weights, vocab_size=ids, **terms, **head)
    total: Tensor = found.sum
    return total


def _with_documents(part: MicroBatch) -> MicroBatch:
    """Rows of one document each, where none were said: filler has its ids, and all parts have the same keys."""
    if part.document_ids is not None:
        return part
    positions = torch.arange(SEQ).repeat(ROWS, 1)
    return MicroBatch(part.tokens, part.labels, positions, torch.zeros_like(positions))


class _Update:
    """torch's SGD, or Forge's optimizers with their mask."""

    def __init__(self, cell: Cell, model: nn.Module) -> None:
        self._masked = cell.optimizer != "sgd"
        self._record = Recorded(model) if cell.optimizer == "lion" else None
        if cell.optimizer in BY_NAME:
            self._optimizer: Any = forges(cell.optimizer, model)
        elif self._masked:
            self._optimizer = build_optimizer(model, OptimizerConfig(**ADAMW))
        else:
            self._optimizer = torch.optim.SGD(model.parameters(), **SGD)

    def __call__(self, skip: Tensor) -> None:
        if self._record is not None:
            self._record()
        self._optimizer.step(skip=skip) if self._masked else self._optimizer.step()
        self._optimizer.zero_grad()

    def switch(self, model: nn.Module, point: str) -> None:
        """To the weights that are evaluated ("eval"), or those that are trained ("train")."""
        reshard(model)
        getattr(self._optimizer, point)()

    @torch.no_grad()
    def evaluate(self, side: Side, step: list[list[MicroBatch]]) -> None:
        """An evaluation between two steps, which leaves weights gathered."""
        self.switch(side.model, "eval")
        for part in together(side.mine(step)).split(side.compute.sequences_at_once):
            side.compute.losses(part)
        routes(side.model)  # which it counted, too
        self.switch(side.model, "train")


def parallel_config(cell: Cell) -> ParallelConfig:
    layout = LAYOUTS[cell.layout]
    axes = layout.keys if dist.get_world_size() == layout.world else {}
    return ParallelConfig(
        **{"device": device().type, "precision": "fp32", **axes, **FEATURES[cell.feature].parallel}
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
