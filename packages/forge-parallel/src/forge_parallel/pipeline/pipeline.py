"""A model in stages: one step of training, and evaluation, over all micro-batches of a data rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_parallel._torch_compat import pipeline_stage
from forge_parallel.axes.context import arguments_with_positions
from forge_parallel.axes.fsdp import reshard
from forge_parallel.config import ParallelConfig
from forge_parallel.meshes import Meshes
from forge_parallel.pipeline.schedule import (
    forward_starts,
    make_schedule,
    num_stages,
    rank_of,
    schedule_problems,
    stages_on,
)
from forge_parallel.pipeline.split import follow_mode, stages_of

Loss = Callable[[Tensor, Tensor], Tensor]


class Pipeline:
    """Runs the stages that `split` (or `parallelize`) left on this rank.

        pipeline = Pipeline(model, config, meshes, num_micro_batches=8, micro_batch=2, seq_len=2048, dim=512)
        loss = pipeline.step(tokens, labels, lambda logits, y: cross_entropy(logits, y).sum / global_valid)

    `micro_batch` rows of `seq_len` tokens (before any cut by cp) make a micro-batch, `dim` is the width of
    the stream between stages; their shapes are fixed, so nothing is run to find them out: the first step
    has as many forwards as any other. `dtype` of the stream: by default that of the compute precision.

    Raises ValueError with what `schedule_problems` finds, and for rows that cp or tp cannot cut.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ParallelConfig,
        meshes: Meshes,
        *,
        num_micro_batches: int,
        micro_batch: int,
        seq_len: int,
        dim: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.config, self.meshes = model, config, meshes
        self.num_micro_batches, self.micro_batch = num_micro_batches, micro_batch
        problems = schedule_problems(config, num_micro_batches, num_stages(config))
        cut = config.tp if config.sequence_parallel else 1
        if seq_len % (config.cp * cut):
            problems.append(
                f"parallel: seq_len {seq_len} must be divisible by cp {config.cp} x tp {cut}, which cut it; "
                f"use a multiple of {config.cp * cut}"
            )
        if problems:
            raise ValueError("\n".join(problems))
        self.length, self.cut = seq_len // config.cp, cut
        if dtype is None:
            dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        shape = (micro_batch, self.length // cut, dim)  # (B, S, D)
        self._stream = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
        self._loss: Loss | None = None
        self.stages = dict(zip(stages_on(config, meshes.pp.rank), stages_of(model), strict=True))
        self.has_last = num_stages(config) - 1 in self.stages
        self._schedule = self._make_schedule()

    def _make_schedule(self) -> Any:
        tokens = torch.empty(self.micro_batch, self.length, dtype=torch.int64, device="meta")
        count, stages = num_stages(self.config), []
        for index, module in self.stages.items():
            if index < count - 1:
                module.register_forward_hook(self._check_stream)
            stage = pipeline_stage(
                module,
                index,
                count,
                self.meshes.device,
                input_args=self._stream if index else tokens,
                output_args=self._stream,
                group=self.meshes.pp.group,
            )
            stages.append(stage)
        loss = lambda output, labels: self._loss(output, labels)  # type: ignore[misc]  # noqa: E731
        return make_schedule(self.config, stages, self.num_micro_batches, loss)

    def step(self, tokens: Tensor, labels: Tensor, loss_fn: Loss, **kwargs: Any) -> Tensor:
        """Forward and backward of all micro-batches; gradients are added to `.grad`, summed and unscaled.

        tokens, labels (num_micro_batches x micro_batch, S): the same on all ranks of a pipeline, this rank's
        part of the rows under cp. `loss_fn(output, labels)` of one micro-batch gives a 0-dim tensor that
        adds up to the loss of the step: a sum of token losses by the valid labels of the global batch.
        Keyword tensors (positions, document_ids) are (B, S) or (1, S), on any device, and reach every
        stage. Returns this rank's sum of losses, 0-dim: 0 where the last stage is not.

        Cost: an activation and its gradient per micro-batch and border of stages. FSDP2 gathers weights as
        its modules say, keeps unsharded gradients until the last micro-batch, then reduces them once.
        """
        follow_mode(self.model)
        kwargs = self._keywords(tokens, labels, self.num_micro_batches, kwargs)
        losses: list[Tensor] = []
        first = (tokens,) if 0 in self.stages else ()
        last: dict[str, Any] = {"target": labels, "losses": losses} if self.has_last else {}
        self._loss = loss_fn
        try:
            self._schedule.step(*first, return_outputs=False, **last, **kwargs)
        finally:
            self._loss = None  # what it holds may be large
        return self._total(losses)

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, labels: Tensor, loss_fn: Loss, **kwargs: Any) -> Tensor:
        """The same sum of losses by forwards alone, whatever the schedule; modes are left as they are.

        tokens, labels (any multiple of micro_batch, S). Weights are sharded again afterwards. Cost: an
        activation per micro-batch and border of stages; the pipe fills and empties once per stage of a rank.
        """
        follow_mode(self.model)
        count = max(1, tokens.size(0) // self.micro_batch)
        kwargs = self._keywords(tokens, labels, count, kwargs)
        rows = [slice(i * self.micro_batch, (i + 1) * self.micro_batch) for i in range(count)]
        batches = [(tokens[part], {n: v[part] for n, v in kwargs.items()}) for part in rows]
        losses = [loss_fn(output, labels[rows[i]]) for i, output in self._forward(batches)]
        reshard(self.model)
        return self._total(losses)

    def _forward(
        self, batches: Sequence[tuple[Tensor, dict[str, Any]]]
    ) -> Iterator[tuple[int, Tensor]]:
        """Send every micro-batch (tokens, kwargs) through all stages: (number, output) behind the last one.

        The clock is common to all: at each tick a rank runs at most one stage on one micro-batch and hands
        the result on. A rank runs one of its stages on all micro-batches before the next, so that it waits
        only where the pipe fills. Memory: the results of one stage for all micro-batches.
        """
        stages, count = self.stages, len(batches)
        stream = torch.empty_like(self._stream, device=self.meshes.device, requires_grad=False)
        waiting: dict[tuple[int, int], Tensor] = {}
        starts = forward_starts(self.config, count)
        for tick in range(starts[-1] + count):
            ops = []
            for stage, module in stages.items():
                i = tick - starts[stage]
                if not 0 <= i < count:
                    continue
                tokens, kwargs = batches[i]
                output = module(tokens if stage == 0 else waiting.pop((stage, i)), **kwargs)
                if stage == len(starts) - 1:
                    yield i, output
                elif stage + 1 in stages:
                    waiting[stage + 1, i] = output
                else:
                    ops.append(self._move(dist.isend, output.contiguous(), stage + 1))
            for stage in stages:
                i = tick - starts[stage - 1]
                if stage > 0 and stage - 1 not in stages and 0 <= i < count:
                    waiting[stage, i] = torch.empty_like(stream)
                    ops.append(self._move(dist.irecv, waiting[stage, i], stage - 1))
            for work in dist.batch_isend_irecv(ops) if ops else ():
                work.wait()

    def _move(self, kind: Any, tensor: Tensor, stage: int) -> dist.P2POp:
        peer = rank_of(self.config, stage)
        return dist.P2POp(kind, tensor, group=self.meshes.pp.group, group_peer=peer)

    def _keywords(
        self, tokens: Tensor, labels: Tensor, count: int, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Keywords as (B, S), after a look at the shapes, which a receiver could not check."""
        shape = (count * self.micro_batch, self.length)
        for name, tensor in (("tokens", tokens), ("labels", labels)):
            if tensor.shape != shape:
                raise ValueError(
                    f"{name} {tuple(tensor.shape)} must be {shape}: {count} micro-batches of "
                    f"{self.micro_batch} rows; give all rows of the step, cut by cp alone"
                )
        given = {name: value for name, value in kwargs.items() if value is not None}
        # a stage that sees a part of each row must know where it is
        if self.cut > 1 and not given and arguments_with_positions(self.model):
            given["positions"] = torch.arange(self.length, device=tokens.device).unsqueeze(0)
        for name, value in given.items():
            rows = tuple(value.shape[:1]) if isinstance(value, Tensor) else ()
            if rows not in ((1,), shape[:1]):
                what = tuple(value.shape) if isinstance(value, Tensor) else repr(value)
                raise ValueError(
                    f"{name} {what} must be a tensor with {shape[0]} rows or 1, to be cut into micro-batches; "
                    "let loss_fn close over what is not per row"
                )
        return {n: v.expand(shape[0], *v.shape[1:]) for n, v in given.items()}

    def _check_stream(self, module: nn.Module, _: Any, output: Any) -> None:
        """What leaves a stage must be what the next one waits for: else it would read other bytes."""
        wanted, got = _kind(self._stream), _kind(output)
        if got != wanted:
            raise ValueError(
                f"stage {module.pipeline_stage} gives {got}, and the next one waits for {wanted}; give "
                "Pipeline the stream's dim and dtype"
            )

    def _total(self, losses: list[Tensor]) -> Tensor:
        if not losses:
            return torch.zeros((), device=self.meshes.device)
        return torch.stack([loss.detach() for loss in losses]).sum()


def _kind(value: Any) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else str(type(value))
