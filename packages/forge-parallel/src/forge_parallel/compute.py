"""Forward and backward of a step in any layout: division of the batch, shards of sequences, pipeline stages.

Shapes: B sequences, S tokens of a sequence, D width of the stream, V vocabulary, K depths of multi-token prediction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_parallel._renamed import renamed, renamed_arguments
from forge_parallel._shared.modes import evaluation_mode
from forge_parallel._shared.problems import invalid, raise_problems
from forge_parallel.axes import (
    accumulate,
    arguments_with_positions,
    reshard,
    shard_sequence,
    sharded_logits_width,
)
from forge_parallel.axes.context import document_numbers
from forge_parallel.check_model import AFTER_EMBEDDING
from forge_parallel.config import ParallelConfig, next_allowed_count
from forge_parallel.meshes import Meshes
from forge_parallel.pipeline import (
    Pipeline,
    stages_of,
    stream_dim,
    sync_tied_gradients,
    tied_copies,
)
from forge_parallel.profile import span
from forge_parallel.protocols import BatchLike
from forge_parallel.rules import mtp_problem

__all__ = [
    "AFTER_EMBEDDING",
    "Compute",
    "MicroBatches",
    "divide_batch",
    "evaluate",
    "evaluate_sequences",
    "mtp_targets",
    "reader_batches",
]

#: The label that losses leave out.
IGNORED = -100

Loss = Callable[..., Tensor]
#: Labels and weights (B, S); with multi-token prediction those of each depth, too; a last one of sources.
Targets = tuple[Tensor | None, ...]


class _Inputs(NamedTuple):
    """The arguments of this rank's model, and the targets of its output."""

    tokens: Tensor
    targets: Targets
    keywords: dict[str, Tensor]
    extras: dict[str, Any]


class Compute:
    """Forward and backward of the sequences that this rank reads, in the layout of a parallelized model.

        compute = Compute(model, config, meshes, micro_batch=4, num_micro_batches=8, seq_len=2048, loss=loss)
        count = global_count(batch.label_weight, meshes)
        local = compute.gradients(batch, lambda: count)
        norm, sums = global_grad_norm(compute.counted, sums=local)      # the loss of the global batch

    `loss(logits (B, S, V), labels (B, S), weights (B, S) or None)` is the 0-dim sum over the labels of weighted
    token losses, or `num_sums` of them (k,), of which the first is trained and evaluated. `sharded_loss` is the same
    for logits (B, S, V / tp), a shard on each tp rank. With `in_head` the model is called with `loss=`, and
    `loss(x (B, S, D), weight (V, D), labels, weights)` runs inside of its head, or `sharded_loss` with the weight's
    rows (V / tp, D); both get the keywords that the head gives (`softcap`). `objective(model, batch)` replaces them, with
    a micro-batch on the device, of sequences that are split over cp:
    0-dim sums over a micro-batch, the first of which is trained; it calls the model itself, so it goes without pp.

    With `mtp_depths` K the model predicts K tokens beyond the next one, too (multi-token prediction): in training it
    gets the keyword `next_tokens` (B, K, S), and its output has (K + 1) B sequences, those of the next token first. The
    trained loss is then that of the next token plus `mtp_weight` times the mean over the K depths, of labels in the
    same document; the first sum stays the loss of the next token, and a last one, beyond `num_sums`, is that mean.

    `by_source`: in training the loss of the next token gets the keyword `sources` (B, S), for each label the number in
    `batch.source` of its sequence, for sums of its own among `num_sums`.

    `keywords` are the fields of a batch that the model's forward takes by name; `dim` is the width of the stream
    between stages, if the model does not declare it. Numbers that the methods return add up over all ranks of
    the job: ranks with a replica of a value (tp) or without one (stages without the head) return zero.

    Raises ValueError if logits are sharded over tp and `called` (how to name the loss) needs full ones. Costs nothing by
    itself: collectives are those of the model, its stages and FSDP2.
    """

    @renamed_arguments(ahead="mtp_depths", ahead_weight="mtp_weight")
    def __init__(
        self,
        model: nn.Module,
        config: ParallelConfig,
        meshes: Meshes,
        *,
        micro_batch: int,
        num_micro_batches: int,
        seq_len: int,
        loss: Loss,
        sharded_loss: Loss | None = None,
        num_sums: int = 1,
        mtp_depths: int = 0,
        mtp_weight: float = 0.0,
        by_source: bool = False,
        in_head: bool = False,
        objective: Callable[[nn.Module, Any], Sequence[Tensor]] | None = None,
        keywords: Sequence[str] = ("positions", "document_ids"),
        dim: int | None = None,
        called: str = "the loss",
    ) -> None:
        self.model, self.meshes, self.micro_batch = model, meshes, micro_batch
        self._loss, self._sharded_loss, self._objective = loss, sharded_loss, objective
        if wrong := mtp_problem(config, mtp_depths):
            raise_problems("", [wrong])
        self._num_sums = num_sums + (mtp_depths > 0)
        self._mtp_depths, self._mtp_weight, self._by_source = mtp_depths, mtp_weight, by_source
        self._in_head = in_head and objective is None
        self._keywords = tuple(keywords)

        self._sharded_width = sharded_logits_width(model)
        if self._sharded_width is not None and (objective or sharded_loss is None):
            rule = f"gives each rank the logits of a part of the vocabulary, and {called} must have whole ones"
            raise invalid("parallel.tp", "logits", config.tp, rule, "use tp = 1")
        # with sequence parallelism, a head that no role shards sees only this tp rank's tokens
        self._head_shards_tokens = False

        # a stage may take less than the model
        stages = [model] if meshes.pp.size == 1 else stages_of(model)
        self._host_inputs = tuple(getattr(model, "host_inputs", ()))
        self._extra_inputs = _names_of(stages, "extra_inputs")
        self._optional = _names_of([model, *stages], "mask_inputs", "optional_inputs")
        self._full_tokens = AFTER_EMBEDDING in self._extra_inputs
        reads_ids = any(getattr(s, "reads_token_ids", False) for s in stages)
        self._sends_ids = meshes.pp.size > 1 and reads_ids

        self._pipeline: Any = None
        if meshes.pp.size > 1:
            self._pipeline = Pipeline(
                model,
                config,
                meshes,
                num_micro_batches=num_micro_batches,
                micro_batch=micro_batch,
                seq_len=seq_len,
                dim=stream_dim(model) if dim is None else dim,
                full_tokens=self._full_tokens,
            )
        copies = tied_copies(model, meshes) if self._pipeline else set()
        self.parameters = list(model.parameters())
        self.counted = [p for p in self.parameters if p not in copies]  # once each, for the norm

    @property
    def sequences_at_once(self) -> int:
        """Sequences of one call of `losses`; a pipeline takes all micro-batches of a step together."""
        if self._pipeline is None:
            return self.micro_batch
        return self.micro_batch * int(self._pipeline.num_micro_batches)

    def gradients(self, batch: BatchLike, normalizer: Callable[[], float]) -> Tensor:
        """Add the gradients of the sum of losses over `normalizer()`; return this rank's summand of that sum,
        (1,) fp32, followed by those of the other sums of the loss or objective.

        `normalizer` is called after the first forward, before the first loss (in a pipeline: before both), so a
        collective that it waits for may overlap with the forward. It may raise the errors of other ranks.
        """
        if self._pipeline is not None:
            count, given = normalizer(), self._local(batch, training=True)
            total = self._pipeline.step(
                given.tokens,
                given.targets,
                lambda output, targets: self._token_loss(output, targets) / count,
                given.extras,
                self._loss_in_head if self._in_head else None,
                **given.keywords,
            )
            sync_tied_gradients(self.model, self.meshes)
            # without the last stage the total is a 0-dim zero
            return self._once_per_replica(total.expand(self._num_sums))

        total = torch.zeros((), device=self.meshes.device)
        micro_batches = batch.split(self.micro_batch)
        for micro_batch in micro_batches:
            accumulate(self.model, last=micro_batch is micro_batches[-1])
            with span("forward"):
                sums = self._sums(micro_batch, training=True)
                loss = sums[0] / normalizer()
                others = [value.detach() / normalizer() for value in sums[1:]]
                del sums  # or graphs of the others would live through the backward
            with span("backward"):
                loss.backward()
            total = total + torch.stack([loss.detach(), *others])
            del loss  # or its graph, with all casts, would live through the next forward
        return self._once_per_replica(total)

    def host_names(self, batch: BatchLike) -> list[str]:
        """Fields and extras of a batch that stay on the host: those of the model's `host_inputs`, and extras that no stage
        here takes. An objective of one's own may take any extra."""
        taken = {*self._extra_inputs, *self._optional}
        unused = [n for n in batch.extras if n not in taken and not self._objective]
        return [*self._host_inputs, *unused]

    @torch.no_grad()
    def losses(self, batch: BatchLike) -> Tensor:
        """Sum of weighted token losses, 0-dim fp32, of `sequences_at_once` sequences, without gradients."""
        if self._pipeline is None:
            return self._once_per_replica(self._sums(batch, training=False)[0])

        def first_sum(output: Any, targets: Targets) -> Tensor:
            return self._token_loss(output, targets).reshape(-1)[0]

        head_loss = self._loss_in_head if self._in_head else None
        return self._once_per_replica(self._run(batch, first_sum, head_loss))

    @torch.no_grad()
    def forward(self, batch: BatchLike) -> None:
        """Call the model on `sequences_at_once` sequences, for hooks inside of it (`forge_parallel.points`); its logits are
        computed and dropped."""
        zero = torch.zeros((), device=self.meshes.device)
        self._run(batch, lambda *_: zero)

    @torch.no_grad()
    def sequence_losses(self, batch: BatchLike) -> Tensor:
        """Sum of weighted token losses of each of `sequences_at_once` sequences, (B,) fp32, without gradients.

        As all numbers of this class they add up over the ranks that read the same sequences. Costs a call of the loss
        for each sequence. ValueError with an objective, which has no losses of sequences.
        """
        if self._objective is not None:
            rule = "has no losses of rows, which need a loss of logits"
            raise invalid("objective", "excludes", ..., rule, "use a loss")
        found: list[Tensor] = []

        def keep(output: Any, targets: Targets) -> Tensor:
            found.append(self._token_loss(output, targets, by_sequence=True))
            return found[-1].sum()

        # a pipeline returns a sum over micro-batches, whose losses come to the last stage in their order
        head_loss = partial(self._loss_in_head, by_sequence=True) if self._in_head else None
        self._run(batch, keep, head_loss)
        zeros = torch.zeros(len(batch.tokens), device=self.meshes.device)
        return self._once_per_replica(torch.cat(found) if found else zeros)

    rows_at_once, row_losses = sequences_at_once, sequence_losses  # names of 0.1, until 0.3.0

    def _sums(self, batch: BatchLike, training: bool) -> Sequence[Tensor]:
        """0-dim sums over a micro-batch, the trained one first."""
        if self._objective is not None:
            return self._objective(self.model, self._local_batch(batch))
        head_loss = self._loss_in_head if self._in_head else None
        return (
            self._call(self._local(batch, training), self._token_loss, head_loss)
            .reshape(-1)
            .unbind()
        )

    def _local_batch(self, batch: BatchLike) -> Any:
        """This rank's part of each sequence, on its device, with the weight of all labels."""
        here: Any = batch.to(self.meshes.device, stay=self._host_inputs)
        if self.meshes.cp.size == 1:
            return here
        names = ("tokens", "labels", "positions", "document_ids", "weights")
        given = {n: x for n in names if (x := getattr(here, n)) is not None}
        local = {n: shard_sequence(x, self.meshes.cp, dim=-1) for n, x in given.items()}
        return replace(here, **local, label_weight=here.label_weight)

    def _run(self, batch: BatchLike, loss: Loss, head_loss: Loss | None = None) -> Tensor:
        """Evaluate `loss(output, targets)` of the model, or the sum of it over the micro-batches of a pipeline."""
        given = self._local(batch, training=False)
        if self._pipeline is None:
            return self._call(given, loss, head_loss)
        total: Tensor = self._pipeline.evaluate(
            given.tokens, given.targets, loss, given.extras, head_loss, **given.keywords
        )
        return total

    def _call(self, given: _Inputs, loss: Loss, head_loss: Loss | None) -> Tensor:
        """`loss` of the model's output, or of the value of `head_loss`, which the head computes in place of logits."""
        more = {} if head_loss is None else {"loss": partial(head_loss, labels=given.targets)}
        output = self.model(given.tokens, **given.keywords, **given.extras, **more)
        return loss(output, given.targets)

    def _loss_in_head(
        self, x: Tensor, weight: Tensor, labels: Targets, by_sequence: bool = False, **head: Any
    ) -> Tensor:
        """The loss of the head's input x (B, S, D), called by the head."""
        sharded = self._sharded_width is not None
        return self._loss_of(x, labels, by_sequence, sharded, weight, **head)

    def _token_loss(self, output: Any, targets: Targets, by_sequence: bool = False) -> Tensor:
        """Weighted sums over the labels; under tp a rank may have a shard of the vocabulary, or of the tokens."""
        if self._in_head:
            return output
        logits: Tensor = getattr(output, "logits", output)  # a Hugging Face model's
        sharded = logits.size(-1) == self._sharded_width
        return self._loss_of(logits, targets, by_sequence, sharded)

    def _loss_of(
        self, x: Tensor, targets: Targets, by_sequence: bool, sharded: bool, *args: Any, **head: Any
    ) -> Tensor:
        """The loss of logits x, or of x and further arguments of a loss in the head."""

        def loss(x: Tensor, targets: Targets) -> Tensor:
            function: Any = self._sharded_loss if sharded else self._loss
            if not sharded:
                targets = self._local_targets(x, targets)
            sources = {"sources": targets[2]} if len(targets) == 3 else {}
            return function(x, *args, *targets[:2], **sources, **head)

        if not by_sequence:
            return self._add_mtp_loss(loss, x, targets)
        sums = []
        for b in range(len(x)):
            of_sequence = tuple(None if t is None else t[b : b + 1] for t in targets)
            sums.append(loss(x[b : b + 1], of_sequence).reshape(-1)[0])
        return torch.stack(sums)

    def _add_mtp_loss(
        self, loss: Callable[[Tensor, Targets], Tensor], x: Tensor, targets: Targets
    ) -> Tensor:
        """The sums of the loss of the next token; with multi-token prediction add the gradient of its mean loss to the
        first, and the mean itself as a last one."""
        depths = len(targets) // 2 - 1
        if not depths:
            return loss(x, targets)
        outputs, sources = x.chunk(depths + 1), targets[2 * depths + 2 :]
        sums = loss(outputs[0], (*targets[:2], *sources)).reshape(-1)
        further = [
            loss(output, targets[2 * k : 2 * k + 2]).reshape(-1)[0]
            for k, output in enumerate(outputs[1:], 1)
        ]
        mean = torch.stack(further).mean()
        # the difference is 0: the reported loss stays that of the next token, and the gradient is that of both
        trained = sums[0] + self._mtp_weight * (mean - mean.detach())
        return torch.stack([trained, *sums[1:], mean.detach()])

    def _local_targets(self, x: Tensor, targets: Targets) -> Targets:
        """Labels, weights and sources of the tokens of x (B, S, ...), which may be only those of this tp rank."""
        labels, tp = targets[0], self.meshes.tp
        assert labels is not None
        if tp.size == 1 or x.size(1) * tp.size != labels.size(1):
            return targets
        self._head_shards_tokens = True
        return tuple(None if t is None else t.chunk(tp.size, 1)[tp.rank] for t in targets)

    def _local(self, batch: BatchLike, training: bool) -> _Inputs:
        """This rank's shard of each sequence, on its device. Labels are shifted already.

        Host inputs of the model stay on the host. Document ids stay unsharded, so that cp ranks need not exchange them;
        so do extras, and tokens that a model concatenates with them before it splits the stream.
        """
        wanted = [n for n in self._extra_inputs if n != AFTER_EMBEDDING]
        wanted += [n for n in self._optional if n in batch.extras and n not in wanted]
        here = batch.to(self.meshes.device, stay=self.host_names(batch))
        shard = partial(shard_sequence, axis=self.meshes.cp)  # x itself without cp

        host = {*self._host_inputs} - {*self._extra_inputs}
        unsharded = {"document_ids"} & host & {*arguments_with_positions(self.model)}
        named = {n: getattr(here, n) for n in self._keywords}
        keywords = {
            n: x if n in unsharded else shard(x, dim=-1) for n, x in named.items() if x is not None
        }
        if self._sends_ids:
            keywords["token_ids"] = shard(here.tokens, dim=-1)
        extras: dict[str, Any] = {n: here.extras[n] for n in wanted}
        if self._full_tokens:
            extras[AFTER_EMBEDDING] = shard
        tokens = here.tokens if self._full_tokens else shard(here.tokens, dim=-1)

        targets: Targets = (here.labels, here.weights)
        if training and self._mtp_depths:
            next_tokens, further = mtp_targets(here, self._mtp_depths)
            keywords["next_tokens"] = shard(next_tokens, dim=-1)
            targets = (*targets, *further)
        if training and self._by_source:
            source: Tensor = cast(Any, here).source  # (B,)
            targets = (*targets, source[:, None].expand_as(here.labels))
        targets = tuple(None if t is None else shard(t, dim=-1) for t in targets)
        return _Inputs(tokens, targets, keywords, extras)

    def _once_per_replica(self, value: Tensor) -> Tensor:
        """A number that is equal on all ranks of a tp group counts on the first of them."""
        # ranks whose head sees only their tokens have different summands, which all count
        counts = self.meshes.tp.rank == 0 or self._head_shards_tokens
        return value if counts else torch.zeros_like(value)


def _names_of(modules: Iterable[nn.Module], *attributes: str) -> tuple[str, ...]:
    """The names that modules list under these attributes, each once."""
    found = (n for m in modules for a in attributes for n in getattr(m, a, ()))
    return tuple(dict.fromkeys(found))


def mtp_targets(batch: BatchLike, depths: int) -> tuple[Tensor, Targets]:
    """Inputs (B, K, S) and targets of K modules of multi-token prediction: at depth k, token i + k and the label of i + k.

    Inputs are 0 where the sequence ends; targets are labels and weights (or None) of depth 1, 2, ..., (B, S) each. They
    are of full sequences, as a shift after sharding would lose the tokens at the edges of shards. A label counts where
    it is in the document of i, as `batch.document_ids` says (a change of id is a boundary); elsewhere it is IGNORED.
    Costs a copy of (B, S) booleans per depth to the device if the ids are on the host.
    """
    ids: Tensor | None = getattr(batch, "document_ids", None)
    number = None if ids is None else document_numbers(ids)
    tokens: list[Tensor] = []
    targets: list[Tensor | None] = []
    for k in range(1, depths + 1):
        labels = F.pad(batch.labels[:, k:], (0, k), value=IGNORED)
        if number is not None:
            other = F.pad(number[:, k:] != number[:, :-k], (0, k), value=True)
            labels = labels.masked_fill(other.to(labels.device, non_blocking=True), IGNORED)
        tokens.append(F.pad(batch.tokens[:, k:], (0, k)))
        weights = batch.weights
        targets += [labels, None if weights is None else F.pad(weights[:, k:], (0, k))]
    return torch.stack(tokens, dim=1), tuple(targets)


def evaluate(
    compute: Compute,
    batches: Sequence[BatchLike],
    count: Callable[[Any], float],
    gather: Callable[[list[float]], list[list[float]]],
) -> float:
    """Mean loss in nats per label over the batches of all ranks, without gradients; the same bits on every rank. nan
    without labels.

        evaluate(compute, batches, lambda batch: batch.label_weight, agreement.exchange)

    Each batch has `compute.sequences_at_once` sequences, and every rank has as many batches. `count` gives the weight of
    the labels of a batch, 0.0 on a rank whose sequences another one counts. `gather(value)` returns the values of all
    ranks, on the host. Restores the mode of each module and leaves the weights sharded, so that weights swapped in for
    the evaluation can be swapped back. Costs one host read and one `gather`.
    """
    model, device = compute.model, compute.meshes.device
    total = torch.zeros((), dtype=torch.float64, device=device)
    with evaluation_mode(model):
        for batch in batches:
            total += compute.losses(batch).double()
    reshard(model)
    sums = gather([float(total), sum(count(batch) for batch in batches)])
    weight = sum(weight for _, weight in sums)
    return sum(loss for loss, _ in sums) / weight if weight else math.nan


def reader_batches(num_sequences: int, batch_size: int, meshes: Meshes) -> list[range]:
    """The sequences of each batch of this reader: batches are the same for any number of readers, which take as many each.

    Those from `num_sequences` on are padding: every rank must take part in every gather.
    """
    each = -(-num_sequences // (batch_size * meshes.batch_size))
    first = each * meshes.batch_rank
    return [range(i * batch_size, (i + 1) * batch_size) for i in range(first, first + each)]


def evaluate_sequences(
    compute: Compute,
    num_sequences: int,
    batch_of: Callable[[range], BatchLike],
    gather: Callable[[list[Any]], list[list[Any]]],
) -> list[float]:
    """Sums of token losses in nats of each sequence, without gradients; of padding after the first `num_sequences`.

    `batch_of` makes the batch of a range of sequences. Otherwise as `evaluate`, and each sequence costs a call of the loss.
    """
    batches = reader_batches(num_sequences, compute.sequences_at_once, compute.meshes)
    with evaluation_mode(compute.model):
        own = [compute.sequence_losses(batch_of(numbers)) for numbers in batches]
    reshard(compute.model)
    found: dict[int, float] = {}
    for start, losses in gather([batches[0].start, torch.cat(own).double().tolist()]):
        for number, loss in enumerate(losses, start):  # several ranks may have a part of a sequence
            found[number] = found.get(number, 0.0) + loss
    return [found[number] for number in sorted(found)]


@dataclass(frozen=True)
class MicroBatches:
    """A global batch in micro-batches of `size` sequences, of which every reader runs `count`.

    Micro-batch j is sequences `j * size .. (j + 1) * size - 1` of the global batch whatever the number of
    readers, so losses per micro-batch and capacities of experts do not depend on it. Reader r has the
    r-th run of them; the first readers have one more if they do not divide evenly. A reader with fewer than `count`
    runs micro-batches of padding sequences after its own, as collectives need every rank.
    """

    global_batch: int
    readers: int
    size: int
    count: int

    @property
    def filler(self) -> float:
        """Padding sequences over sequences of data: 0.5 means that a step computes half as much again."""
        return self.count * self.size * self.readers / self.global_batch - 1.0

    @property
    def cost(self) -> str | None:
        """A line on the cost of padding sequences; None without any."""
        if self.filler <= 0:
            return None
        return (
            f"{self.readers} readers share {self.global_batch} rows in micro-batches of {self.size}, {self.count} on "
            f"each: {self.filler:.1%} of the computation is added as filler"
        )


#: Sequences that a rank computes, padding included, over an even division: limit in the search for a large micro-batch.
_TOLERATED = 1.1


def divide_batch(
    config: ParallelConfig, global_batch: int, readers: int, micro_batch: int | None = None
) -> MicroBatches:
    """Divide `global_batch` sequences among `readers` (`Layout.batch_size`) of a job.

        micro_batches = divide_batch(config, global_batch=256, readers=12)       # 3 micro-batches of 8

    Without a `micro_batch` it is all sequences of a reader, where the division is even and the pipeline schedule
    can run it; otherwise the largest divisor of the global batch with which a reader computes at most a
    tenth more sequences than in an even division, or failing that the fewest sequences. The count is raised to
    the next one that the schedule allows. Raises ValueError for a micro_batch that does not divide the
    global batch, and for no sequences or readers.
    """
    for name, count in (("global_batch", global_batch), ("readers", readers)):
        if count < 1:
            fix = "use the rows of a step and Layout.batch_size"
            raise invalid(name, "range", count, "must be at least 1", fix)

    def of_size(size: int) -> MicroBatches:
        count = -(-global_batch // (size * readers))
        return MicroBatches(global_batch, readers, size, next_allowed_count(config, count))

    if micro_batch is not None:
        if micro_batch < 1 or global_batch % micro_batch:
            fix = f"use {_divisors(global_batch, micro_batch)[-1]}"
            rule = f"must divide global_batch {global_batch}"
            raise invalid("micro_batch", "divides", micro_batch, rule, fix)
        return of_size(micro_batch)

    per_reader = -(-global_batch // readers)
    at_once = of_size(per_reader) if global_batch % readers == 0 else None
    if at_once and at_once.count == 1:
        return at_once
    limit = _TOLERATED * per_reader
    possible = [of_size(size) for size in _divisors(global_batch, int(limit))]
    near = [p for p in possible if p.count * p.size <= limit]
    return near[-1] if near else min(reversed(possible), key=lambda p: p.count * p.size)


def _divisors(number: int, limit: int) -> list[int]:
    """Those up to `limit`, ascending; 1 at least."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({d for s in small for d in (s, number // s) if d <= max(limit, 1)})


__getattr__ = partial(renamed, __name__)
