"""A model in stages: one step of training, and evaluation, over all micro-batches of a data rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_parallel._renamed import renamed_arguments
from forge_parallel._shared.problems import invalid, raise_problems
from forge_parallel._torch_compat import pipeline_stage
from forge_parallel.axes.context import arguments_with_positions
from forge_parallel.axes.fsdp import reshard
from forge_parallel.config import (
    ParallelConfig,
    forward_starts,
    num_stages,
    rank_of,
    splits_backward,
    stages_on,
)
from forge_parallel.meshes import Meshes
from forge_parallel.pipeline.split import follow_mode
from forge_parallel.rules import schedule_problems, uneven_sequence
from forge_parallel.structure import stages_of

Loss = Callable[[Tensor, Any], Tensor]


class Pipeline:
    """Runs the stages that `split` (or `parallelize`) left on this rank.

        pipeline = Pipeline(model, config, meshes, num_micro_batches=8, micro_batch=2, seq_len=2048, dim=512)
        loss = pipeline.step(tokens, labels, lambda logits, y: cross_entropy(logits, y).sum / global_valid)

    `micro_batch` sequences of `seq_len` tokens (before cp shards them) make a micro-batch, `dim` is the width of
    the stream between stages; their shapes are fixed, so nothing is run to find them out: the first step
    has as many forwards as any other. `dtype` of the stream: by default that of the compute precision.
    `full_tokens`: the first stage takes full sequences of tokens under cp, and shards the stream itself.

    torch's schedule carries sequence numbers in place of keywords and targets; a stage and the loss look up the values
    of a micro-batch by them, so values need not be tensors that dim 0 splits.

    Evaluation does not use torch's `schedule.eval()`: it runs as many micro-batches as training, holds the logits
    of all of them until the end, and torch 2.13 sets up its stages again at each switch from and to training.

    Raises ValueError with the problems of `schedule_problems`, and for sequences that cp or tp cannot divide.
    """

    @renamed_arguments(whole_tokens="full_tokens")
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
        full_tokens: bool = False,
    ) -> None:
        self.model, self.config, self.meshes = model, config, meshes
        self.num_micro_batches, self.micro_batch = num_micro_batches, micro_batch
        problems = schedule_problems(config, num_micro_batches, num_stages(config))
        token_ranks = config.tp if config.sequence_parallel else 1
        if wrong := uneven_sequence(seq_len, config.cp, token_ranks):
            problems.append(wrong)
        raise_problems("", problems)

        self.length, self.token_ranks = seq_len // config.cp, token_ranks
        self.tokens_length = seq_len if full_tokens else self.length
        if dtype is None:
            dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        shape = (micro_batch, self.length // token_ranks, dim)  # (B, S, D)
        self._stream = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

        # of the running step; see `_given`
        self._loss: Loss | None = None
        self._losses: list[Tensor] = []
        self._head_loss: Callable[..., Tensor] | None = None
        self._targets: Any = None
        self._inputs: Mapping[str, Any] = {}
        self._extras: Mapping[str, Any] = {}

        self.stages = dict(zip(stages_on(config, meshes.pp.rank), stages_of(model), strict=True))
        self.has_last = num_stages(config) - 1 in self.stages
        self._schedule = self._make_schedule()

    def _make_schedule(self) -> Any:
        """Wrap the stages as torch's PipelineStages, with hooks for arguments and shapes, and put them into a schedule."""
        tokens = torch.empty(self.micro_batch, self.tokens_length, dtype=torch.int64, device="meta")
        count, stages = num_stages(self.config), []
        for index, module in self.stages.items():
            if index < count - 1:
                module.register_forward_hook(self._check_stream)
            # before FSDP2's pre-forward hook, which moves and casts the arguments
            module.register_forward_pre_hook(
                self._look_up_arguments, with_kwargs=True, prepend=True
            )
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
        return make_schedule(self.config, stages, self.num_micro_batches, self._loss_of)

    def _loss_of(self, output: Tensor, numbers: Tensor) -> Tensor:
        """The trained loss of a micro-batch, of the sequences `numbers`."""
        assert self._loss is not None
        sums = self._loss(output, _take(self._targets, _slice(numbers)))
        self._losses.append(sums.detach())
        # a view could not be detached in place, as schedules that halve the backward do
        return sums if sums.dim() == 0 else sums[0].clone()

    def _look_up_arguments(
        self, module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Replace the sequence numbers of a micro-batch by the keywords of its sequences."""
        at = _slice(kwargs.pop("rows"))
        may = [n for k in ("mask_inputs", "optional_inputs") for n in getattr(module, k, ())]
        given = [n for n in may if n in self._extras]
        names = dict.fromkeys((*getattr(module, "extra_inputs", ()), *given))
        extras = {name: self._extras[name] for name in names}
        found = {name: _take(value, at) for name, value in {**self._inputs, **extras}.items()}
        if self._head_loss is not None and module is self.stages.get(num_stages(self.config) - 1):
            found["loss"] = partial(self._head_loss, labels=_take(self._targets, at))
        return args, {**kwargs, **found}

    @renamed_arguments(then="head_loss")
    def step(
        self,
        tokens: Tensor,
        labels: Any,
        loss_fn: Loss,
        extras: Mapping[str, Any] | None = None,
        head_loss: Callable[..., Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Forward and backward of all micro-batches; gradients are added to `.grad`, summed and unscaled.

        tokens, labels (num_micro_batches x micro_batch, S): the same on all ranks of a pipeline, this rank's
        shard of the sequences under cp. `loss_fn(output, labels)` of one micro-batch gives a 0-dim tensor that
        adds up to the loss of the step: a sum of token losses by the valid labels of the global batch; or several
        (k,), of which the first is trained.
        `labels` may be a tuple of such tensors (or None), of which the loss gets the same tuple.
        Keyword tensors (positions, document_ids) have as many sequences or 1, on any device, and reach every
        stage. `extras`, tensors or ragged values that a slice of sequences indexes, reach the stages that name
        them in `extra_inputs`, a callable among them as it is. `head_loss(x, weight, labels=...)`, which the last
        stage's forward takes as `loss(x, weight)`, gives the output that `loss_fn` gets. Returns this rank's sum of
        losses, 0-dim or (k,): 0-dim and 0 without the last stage.

        Cost: an activation and its gradient per micro-batch and stage boundary. FSDP2 gathers weights as
        its modules say, keeps unsharded gradients until the last micro-batch, then reduces them once.
        """
        numbers = torch.arange(len(tokens))  # torch's schedule splits these with the tokens
        first = (tokens,) if 0 in self.stages else ()
        last: dict[str, Any] = {"target": numbers} if self.has_last else {}
        with self._given(tokens, labels, self.num_micro_batches, extras, head_loss, kwargs):
            self._loss = loss_fn
            self._schedule.step(*first, return_outputs=False, **last, rows=numbers)
            return self._total(self._losses)

    @contextmanager
    def _given(
        self, tokens: Tensor, labels: Any, count: int, extras: Any, head_loss: Any, kwargs: Any
    ) -> Iterator[None]:
        """Hold the arguments of a step of `count` micro-batches, and release them afterwards: they may be large."""
        follow_mode(self.model)
        self._inputs = self._keywords(tokens, labels, count, kwargs)
        self._targets, self._extras, self._head_loss = labels, extras or {}, head_loss
        try:
            yield
        finally:
            self._targets, self._inputs, self._extras, self._loss = None, {}, {}, None
            self._head_loss, self._losses = None, []

    @torch.no_grad()
    @renamed_arguments(then="head_loss")
    def evaluate(
        self,
        tokens: Tensor,
        labels: Any,
        loss_fn: Loss,
        extras: Mapping[str, Any] | None = None,
        head_loss: Callable[..., Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The same sum of losses by forwards only, for every schedule; training and eval modes are not changed.

        Arguments as in `step`, with any multiple of micro_batch sequences. Weights are sharded again afterwards. Cost: an
        activation per micro-batch and stage boundary; the pipe fills and empties once per stage of a rank.
        """
        count = max(1, tokens.size(0) // self.micro_batch)
        numbers = torch.arange(len(tokens)).split(self.micro_batch)
        with self._given(tokens, labels, count, extras, head_loss, kwargs):
            losses = [
                loss_fn(output, _take(labels, _slice(numbers[i])))
                for i, output in self._forward(tokens, numbers)
            ]
        reshard(self.model)
        return self._total(losses)

    def _forward(self, tokens: Tensor, numbers: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Send every micro-batch i, sequences `numbers[i]`, through all stages: (i, output) after the last one.

        All ranks count the same ticks: at each a rank runs at most one stage on one micro-batch and sends the
        result on. A rank runs one of its stages on all micro-batches before the next, so that it waits only while
        the pipeline fills. Memory: the outputs of one stage for all micro-batches.
        """
        stages, count = self.stages, len(numbers)
        stream = torch.empty_like(self._stream, device=self.meshes.device, requires_grad=False)
        received: dict[tuple[int, int], Tensor] = {}
        starts = forward_starts(self.config, count)

        for tick in range(starts[-1] + count):
            ops = []
            for stage, module in stages.items():
                i = tick - starts[stage]
                if not 0 <= i < count:
                    continue
                given = received.pop((stage, i)) if stage else tokens[_slice(numbers[i])]
                output = module(given, rows=numbers[i])
                if stage == len(starts) - 1:
                    yield i, output
                elif stage + 1 in stages:
                    received[stage + 1, i] = output
                else:
                    ops.append(self._p2p(dist.isend, output.contiguous(), stage + 1))

            # buffers for outputs of the same tick on other ranks
            for stage in stages:
                i = tick - starts[stage - 1]
                if stage > 0 and stage - 1 not in stages and 0 <= i < count:
                    received[stage, i] = torch.empty_like(stream)
                    ops.append(self._p2p(dist.irecv, received[stage, i], stage - 1))
            for work in dist.batch_isend_irecv(ops) if ops else ():
                work.wait()

    def _p2p(self, kind: Any, tensor: Tensor, stage: int) -> dist.P2POp:
        """A send to, or a receive from, the rank of a stage."""
        peer = rank_of(self.config, stage)
        return dist.P2POp(kind, tensor, group=self.meshes.pp.group, group_peer=peer)

    def _keywords(
        self, tokens: Tensor, labels: Any, count: int, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Keywords as (B, S). Shapes are checked, as a later stage receives buffers of fixed shape."""
        batch = count * self.micro_batch
        wanted = {"tokens": (tokens, (batch, self.tokens_length))}
        targets = labels if isinstance(labels, tuple) else (labels,)
        names = ["labels", *(f"labels[{i}]" for i in range(1, len(targets)))]
        wanted |= {n: (target, (batch, self.length)) for n, target in zip(names, targets)}
        for name, (tensor, shape) in wanted.items():
            if tensor is not None and tensor.shape != shape:
                rule = f"must be {shape}: {count} micro-batches of {self.micro_batch} sequences"
                fix = "give all rows of the step, cut by cp alone"
                raise invalid(name, "shape", tuple(tensor.shape), rule, fix)

        given = {name: value for name, value in kwargs.items() if value is not None}
        # a stage that sees a shard of each sequence needs the positions of its tokens
        if self.token_ranks > 1 and not given and arguments_with_positions(self.model):
            given["positions"] = torch.arange(self.length, device=tokens.device).unsqueeze(0)
        for name, value in given.items():
            if not isinstance(value, Tensor) or value.dim() == 0 or len(value) not in (1, batch):
                what = tuple(value.shape) if isinstance(value, Tensor) else value
                rule = f"must be a tensor of {batch} sequences or 1, to be split into micro-batches"
                raise invalid(
                    name, "rows", what, rule, "let loss_fn close over what is not per row"
                )
        return {n: v.expand(batch, *v.shape[1:]) for n, v in given.items()}

    def _check_stream(self, module: nn.Module, _: Any, output: Any) -> Any:
        """Compare a stage's output with the next one's buffer: another shape or dtype would be read as wrong bytes.

        Schedules that halve the backward detach the output in place, at which torch raises for a view: they get a copy.
        """
        wanted, got = _kind(self._stream), _kind(output)
        if got != wanted:
            rule = f"gives {got}, and the next one waits for {wanted}"
            fix = "give Pipeline the stream's dim and dtype"
            raise invalid("stage", "stream", module.pipeline_stage, rule, fix)
        return output.clone() if output._is_view() and splits_backward(self.config) else output

    def _total(self, losses: list[Tensor]) -> Tensor:
        """The sum of the losses of micro-batches; 0 without any."""
        if not losses:
            return torch.zeros((), device=self.meshes.device)
        return torch.stack([loss.detach() for loss in losses]).sum(0)


def make_schedule(
    config: ParallelConfig,
    stages: Sequence[Any],
    num_micro_batches: int,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
) -> Any:
    """torch's schedule over this rank's PipelineStages; gradients are summed, never scaled."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    kind = get_schedule_class(config.pp_schedule.replace("_", ""))  # "interleaved1f1b"
    one_or_all = stages[0] if config.stages_per_rank == 1 else list(stages)
    return kind(one_or_all, num_micro_batches, loss_fn=loss_fn, scale_grads=False)


def _slice(numbers: Tensor) -> slice:
    """The slice of the step's sequences that a chunk of `arange(batch)` stands for.

    A chunk is a view, so its storage offset equals its first number: reading the value would wait for the device.
    """
    first = int(numbers.storage_offset())
    return slice(first, first + len(numbers))


def _take(value: Any, at: slice) -> Any:
    """Some sequences of a tensor, of ragged values, or of each in a tuple; None and a callable as they are."""
    if isinstance(value, tuple):
        return tuple(_take(each, at) for each in value)
    return value if value is None or callable(value) else value[at]


def _kind(value: Any) -> str:
    """Shape and dtype of a value, for messages."""
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else str(type(value))
