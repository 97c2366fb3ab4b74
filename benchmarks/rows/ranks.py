"""A step on two ranks: Forge's library next to FSDP2 by hand, with the same model, loss and tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.harness import Step
from benchmarks.rows import Row, Setting
from benchmarks.rows.runner import IGNORED, LR, MAX_NORM, MODELS, adamw
from torch import Tensor


@dataclass(frozen=True)
class Rank:
    """Case: the keys of a model, the shape of a rank's batch and its place in the meshes."""

    model: dict[str, Any]
    batch: int
    seq_len: int
    meshes: Any

    def inputs(self) -> tuple[Tensor, Tensor]:
        """This rank's tokens and labels (B, S); a tenth of the labels is ignored."""
        generator = torch.Generator().manual_seed(self.meshes.rank)
        shape, vocab = (self.batch, self.seq_len + 1), self.model["vocab_size"]
        rows = torch.randint(0, vocab, shape, generator=generator)
        tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].clone()
        labels[torch.rand(labels.shape, generator=generator) < 0.1] = IGNORED
        return tokens.to(self.meshes.device), labels.to(self.meshes.device)

    def on_meta(self) -> Any:
        from forge_core import Transformer, TransformerConfig

        with torch.device("meta"):
            return Transformer(TransformerConfig(**self.model, max_seq_len=self.seq_len))


def rank(setting: Setting) -> Rank:
    from forge_parallel import ParallelConfig, launch

    config = ParallelConfig(device=setting.device.type, precision="fp32")
    meshes = setting.stack.enter_context(launch(config))
    return Rank(setting.of(*MODELS["22.8M"]), 2, setting.of(512, 16, 2048), meshes)


def forge(case: Rank) -> Callable[[], Tensor]:
    """`parallelize`, one vote between hosts, the gradient norm with the loss, AdamW masked where numbers are not finite."""
    from forge_core import OptimizerConfig, build_optimizer, cross_entropy, initialize
    from forge_parallel import (
        ParallelConfig,
        accumulate,
        clip_grads_,
        global_grad_norm,
        parallelize,
    )
    from forge_resilience import Agreement, Vote, nonfinite

    tokens, labels = case.inputs()
    config = ParallelConfig(device=tokens.device.type, precision="fp32")
    model = parallelize(case.on_meta(), config, case.meshes)
    initialize(model, seed=0)
    parameters = list(model.parameters())
    optimizer = build_optimizer(model, OptimizerConfig(lr=LR))
    agreement, num_valid = Agreement(case.meshes.host_group), int((labels != IGNORED).sum())

    def step() -> Tensor:
        pending = agreement.start(Vote(count=num_valid))
        accumulate(model, last=True)
        logits = model(tokens)
        loss = cross_entropy(logits, labels).sum / max(1, pending.wait().count)
        loss.backward()
        norm, sums = global_grad_norm(parameters, sums=loss.detach().reshape(1))
        assert sums is not None
        clip_grads_(parameters, norm, MAX_NORM)
        optimizer.step(skip=nonfinite(sums[0], norm))
        optimizer.zero_grad()
        return sums[0]

    return Step(step, before=dist.barrier)


def by_hand(case: Rank) -> Callable[[], Tensor]:
    """`fully_shard` on each block and the root, the label count all-reduced, torch's clipping and fused AdamW."""
    from torch.distributed.fsdp import fully_shard

    from forge_core import cross_entropy, initialize

    tokens, labels = case.inputs()
    model = case.on_meta()
    for module in [*model.blocks(), model]:
        fully_shard(module, mesh=case.meshes.dense, reshard_after_forward=module is not model)
    model.to_empty(device=tokens.device)
    initialize(model, seed=0)
    parameters, optimizer = list(model.parameters()), adamw(model)

    def step() -> Tensor:
        count = (labels != IGNORED).sum()
        dist.all_reduce(count)
        total = cross_entropy(model(tokens), labels).sum
        loss = total * dist.get_world_size() / count  # FSDP2 takes the mean of the ranks
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Step(step, before=dist.barrier)


ROWS = [
    Row("ranks-2", rank, {"forge": forge, "by_hand": by_hand},
        "dense 22.8M fp32 on two ranks, 2 rows of 512 each; Forge: the step of the library; by hand: FSDP2, all-reduced label count, "
        "clip_grad_norm_, fused AdamW", bounds={"by_hand": 0.98}, ranks=2),
]  # fmt: skip
