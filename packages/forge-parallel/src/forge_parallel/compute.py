"""Forward and backward of a step in any layout: micro-batches, parts of sequences, pipeline stages.

Shapes: B rows, S tokens of a row, D width of the stream, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from forge_parallel._shared.modes import evaluation_mode
from forge_parallel._shared.problems import Problem, invalid, raise_problems
from forge_parallel.axes import (
    accumulate,
    arguments_with_positions,
    cut_sequence,
    width_of_cut_logits,
)
from forge_parallel.axes.fsdp import reshard
from forge_parallel.config import Layout, ParallelConfig
from forge_parallel.further_ahead import further_ahead
from forge_parallel.legal import ahead_problem
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

__all__ = ["AFTER_EMBEDDING", "Compute", "evaluate", "extra_problems"]

#: An extra input that is not data: a function that the model calls on its stream (B, S, D), to split it over cp.
AFTER_EMBEDDING = "after_embedding"

#: An extra input (B, S) of rows whose documents have branches, 0 where these share: no model may ignore it.
BRANCH_IDS = "branch_ids"

Loss = Callable[..., Tensor]
#: Labels and weights (B, S); with tokens further ahead those of each depth, too; a last one of sources.
Targets = tuple[Tensor | None, ...]


class _Inputs(NamedTuple):
    """The arguments of this rank's model, and the targets of its output."""

    tokens: Tensor
    targets: Targets
    keywords: dict[str, Tensor]
    extras: dict[str, Any]


class Compute:
    """Forward and backward of the rows that this rank reads, in the layout of a parallelized model.

        compute = Compute(model, config, meshes, micro_batch=4, num_micro_batches=8, seq_len=2048, loss=loss)
        count = global_count(batch.label_weight, meshes)
        share = compute.gradients(batch, lambda: count)
        norm, sums = global_grad_norm(compute.counted, sums=share)      # the loss of the global batch

    `loss(logits (B, S, V), labels (B, S), weights (B, S) or None)` is the 0-dim sum over the labels of weighted
    token losses, or `num_sums` of them (k,), of which the first is trained and evaluated. `sharded_loss` is the same
    for logits (B, S, V / tp) of which each tp rank has a part. With `in_head` the model is called with `then=`, and
    `loss(x (B, S, D), weight (V, D), labels, weights)` runs inside of its head, or `sharded_loss` with the weight's
    rows (V / tp, D); both get the keywords that the head gives (`softcap`). `objective(model, part)` replaces them, with
    a micro-batch on the device, of sequences that are split over cp:
    0-dim sums over a micro-batch, the first of which is trained; it calls the model itself, so it goes without pp.

    With `ahead` K the model predicts K tokens beyond the next one, too (multi-token prediction): in training it gets
    the keyword `next_tokens` (B, K, S), and its output has (K + 1) B rows, those of the next token first. What is
    trained is then the loss plus `ahead_weight` times the mean over K of theirs, of labels in the same document; the
    first sum stays the loss alone, and a last one, beyond `num_sums`, is that mean.

    `by_source`: in training the loss of the next token gets the keyword `sources` (B, S), for each label the number in
    `batch.source` of its row, for sums of its own among `num_sums`.

    `keywords` are the fields of a batch that the model's forward takes by name; `dim` is the width of the stream
    between stages, if the model does not declare it. Numbers that the methods return add up over all ranks of
    the job: ranks with a copy (tp) or without a value (stages without the head) return zero.

    Raises ValueError where each tp rank has a part of the logits and `called` (how to name the loss) needs
    whole ones. Costs nothing by itself: collectives are those of the model, its stages and FSDP2.
    """

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
        ahead: int = 0,
        ahead_weight: float = 0.0,
        by_source: bool = False,
        in_head: bool = False,
        objective: Callable[[nn.Module, Any], Sequence[Tensor]] | None = None,
        keywords: Sequence[str] = ("positions", "document_ids"),
        dim: int | None = None,
        called: str = "the loss",
    ) -> None:
        self.model, self.meshes, self.micro_batch = model, meshes, micro_batch
        self._loss, self._sharded_loss, self._objective = loss, sharded_loss, objective
        if wrong := ahead_problem(config, ahead):
            raise_problems("", [wrong])
        self._num_sums = num_sums + (ahead > 0)
        self._ahead, self._ahead_weight, self._by_source = ahead, ahead_weight, by_source
        self._in_head = in_head and objective is None
        self._keywords = tuple(keywords)
        self._sharded_width = width_of_cut_logits(model)
        if self._sharded_width is not None and (objective or sharded_loss is None):
            rule = f"gives each rank the logits of a part of the vocabulary, and {called} must have whole ones"
            raise invalid("parallel.tp", "logits", config.tp, rule, "use tp = 1")
        # with sequence parallelism, a head that no role shards sees this tp rank's tokens alone
        self._head_shares_tokens = False
        stages = [model] if meshes.pp.size == 1 else stages_of(model)
        self._host_inputs = tuple(getattr(model, "host_inputs", ()))
        # a stage may take less than the whole model
        self._extra_inputs = list(
            dict.fromkeys(n for s in stages for n in getattr(s, "extra_inputs", ()))
        )
        may = ("mask_inputs", "optional_inputs")
        self._optional = tuple(
            dict.fromkeys(n for m in (model, *stages) for k in may for n in getattr(m, k, ()))
        )
        self._whole_tokens = AFTER_EMBEDDING in self._extra_inputs
        self._sends_ids = meshes.pp.size > 1 and any(
            getattr(s, "reads_token_ids", False) for s in stages
        )
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
                whole_tokens=self._whole_tokens,
            )
        copies = tied_copies(model, meshes) if self._pipeline else set()
        self.parameters = list(model.parameters())
        self.counted = [p for p in self.parameters if p not in copies]  # once each, for the norm

    @property
    def rows_at_once(self) -> int:
        """Rows of one call of `losses`; a pipeline takes all micro-batches of a step together."""
        if self._pipeline is None:
            return self.micro_batch
        return self.micro_batch * int(self._pipeline.num_micro_batches)

    def gradients(self, batch: BatchLike, normaliser: Callable[[], float]) -> Tensor:
        """Add the gradients of the sum of losses over `normaliser()`; returns this rank's share of that sum,
        (1,) fp32, followed by the shares of the other sums of the loss or objective.

        `normaliser` is called after the first forward, before the first loss (in a pipeline: before both), so a
        collective that it waits for may overlap with the forward.
        """
        if self._pipeline is not None:
            return self._through_stages(batch, normaliser())
        total = torch.zeros((), device=self.meshes.device)
        parts = batch.split(self.micro_batch)
        for part in parts:
            accumulate(self.model, last=part is parts[-1])
            with span("forward"):
                sums = self._sums(part)
                loss = sums[0] / normaliser()
                others = [value.detach() / normaliser() for value in sums[1:]]
                del sums
            with span("backward"):
                loss.backward()
            total = total + torch.stack([loss.detach(), *others])
        return self._once_per_copy(total)

    def host_names(self, batch: BatchLike) -> list[str]:
        """Fields and extras of a batch that stay on the host: those of the model's `host_inputs`, and extras that no stage
        here takes. An objective of one's own may take any extra."""
        taken = {*self._extra_inputs, *self._optional}
        unused = [n for n in batch.extras if n not in taken and not self._objective]
        return [*self._host_inputs, *unused]

    @torch.no_grad()
    def losses(self, batch: BatchLike) -> Tensor:
        """Sum of weighted token losses, 0-dim fp32, of `rows_at_once` rows, without gradients."""
        if self._pipeline is None:
            total = self._sums(batch)[0]
        else:
            given = self._local(batch, training=False)
            total = self._pipeline.evaluate(
                given.tokens,
                given.targets,
                lambda output, targets: self._token_loss(output, targets).reshape(-1)[0],
                given.extras,
                self._then,
                **given.keywords,
            )
        return self._once_per_copy(total)

    @torch.no_grad()
    def forward(self, batch: BatchLike) -> None:
        """Call the model on `rows_at_once` rows for who looks inside of it (`forge_parallel.points`); its logits are
        computed and dropped."""
        given = self._local(batch, training=False)
        if self._pipeline is None:
            self.model(given.tokens, **given.keywords, **given.extras)
            return
        none = torch.zeros((), device=self.meshes.device)
        self._pipeline.evaluate(
            given.tokens, given.targets, lambda *_: none, given.extras, **given.keywords
        )

    @torch.no_grad()
    def row_losses(self, batch: BatchLike) -> Tensor:
        """Sum of weighted token losses of each of `rows_at_once` rows, (B,) fp32, without gradients.

        As all numbers of this class they add up over the ranks that read the same rows. Costs a call of the loss for
        each row. ValueError with an objective, which has no losses of rows.
        """
        if self._objective is not None:
            rule = "has no losses of rows, which need a loss of logits"
            raise invalid("objective", "excludes", ..., rule, "use a loss")
        given = self._local(batch, training=False)
        then = partial(self._loss_in_head, by_row=True) if self._in_head else None
        found: list[Tensor] = []

        def keep(output: Any, targets: Targets) -> Tensor:
            found.append(self._token_loss(output, targets, by_row=True))
            return found[-1].sum()

        if self._pipeline is None:
            more = {"then": partial(then, labels=given.targets)} if then else {}
            keep(self.model(given.tokens, **given.keywords, **given.extras, **more), given.targets)
        else:  # its sum is over micro-batches, which come to the last stage in their order
            self._pipeline.evaluate(
                given.tokens, given.targets, keep, given.extras, then, **given.keywords
            )
        none = torch.zeros(len(given.tokens), device=self.meshes.device)
        return self._once_per_copy(torch.cat(found) if found else none)

    def _sums(self, part: BatchLike) -> Sequence[Tensor]:
        """0-dim sums over a micro-batch, the one that is trained first."""
        if self._objective is not None:
            return self._objective(self.model, self._local_batch(part))
        given = self._local(part, training=torch.is_grad_enabled())
        more = {"then": partial(self._then, labels=given.targets)} if self._then else {}
        output = self.model(given.tokens, **given.keywords, **given.extras, **more)
        return self._token_loss(output, given.targets).reshape(-1).unbind()

    def _local_batch(self, batch: BatchLike) -> Any:
        """This rank's part of each sequence, on its device, with the weight of all labels."""
        here: Any = batch.to(self.meshes.device, stay=self._host_inputs)
        if self.meshes.cp.size == 1:
            return here
        names = ("tokens", "labels", "positions", "document_ids", "weights")
        given = {n: x for n in names if (x := getattr(here, n)) is not None}
        local = {n: cut_sequence(x, self.meshes.cp, dim=-1) for n, x in given.items()}
        return replace(here, **local, label_weight=here.label_weight)

    def _through_stages(self, batch: BatchLike, normaliser: float) -> Tensor:
        given = self._local(batch, training=True)
        total = self._pipeline.step(
            given.tokens,
            given.targets,
            lambda output, targets: self._token_loss(output, targets) / normaliser,
            given.extras,
            self._then,
            **given.keywords,
        )
        sync_tied_gradients(self.model, self.meshes)
        return self._once_per_copy(total.expand(self._num_sums))

    @property
    def _then(self) -> Callable[..., Tensor] | None:
        """The function that the model's head computes in place of logits."""
        return self._loss_in_head if self._in_head else None

    def _loss_in_head(
        self, x: Tensor, weight: Tensor, labels: Targets, by_row: bool = False, **head: Any
    ) -> Tensor:
        def loss(x: Tensor, labels: Targets) -> Tensor:
            if self._sharded_width is not None:
                assert self._sharded_loss is not None
                return self._sharded_loss(x, weight, *labels[:2], **_sources(labels), **head)
            labels = self._labels_of(x, labels)
            return self._loss(x, weight, *labels[:2], **_sources(labels), **head)

        return _of_each_row(loss, x, labels) if by_row else self._with_ahead(loss, x, labels)

    def _token_loss(self, output: Any, targets: Targets, by_row: bool = False) -> Tensor:
        """Weighted sums over the labels; under tp a rank may have a part of the vocabulary, or of the tokens."""
        if self._in_head:
            return output

        def loss(logits: Tensor, targets: Targets) -> Tensor:
            if logits.size(-1) == self._sharded_width:
                assert self._sharded_loss is not None
                return self._sharded_loss(logits, *targets[:2], **_sources(targets))
            targets = self._labels_of(logits, targets)
            return self._loss(logits, *targets[:2], **_sources(targets))

        logits: Tensor = getattr(output, "logits", output)  # a Hugging Face model's
        if by_row:
            return _of_each_row(loss, logits, targets)
        return self._with_ahead(loss, logits, targets)

    def _with_ahead(
        self, loss: Callable[[Tensor, Targets], Tensor], x: Tensor, targets: Targets
    ) -> Tensor:
        """The loss of the next token; with further tokens its first sum has the gradient of theirs, and they follow."""
        depths = len(targets) // 2 - 1
        if not depths:
            return loss(x, targets)
        parts, sources = x.chunk(depths + 1), targets[2 * depths + 2 :]
        sums = loss(parts[0], (*targets[:2], *sources)).reshape(-1)
        further = [
            loss(part, targets[2 * k : 2 * k + 2]).reshape(-1)[0]
            for k, part in enumerate(parts[1:], 1)
        ]
        mean = torch.stack(further).mean()
        trained = sums[0] + self._ahead_weight * (mean - mean.detach())
        return torch.stack([trained, *sums[1:], mean.detach()])

    def _labels_of(self, x: Tensor, targets: Targets) -> Targets:
        """Labels, weights and sources of the tokens of x (B, S, ...), which may be those of this tp rank alone."""
        labels, tp = targets[0], self.meshes.tp
        assert labels is not None
        if tp.size == 1 or x.size(1) * tp.size != labels.size(1):
            return targets
        self._head_shares_tokens = True
        return tuple(None if t is None else t.chunk(tp.size, 1)[tp.rank] for t in targets)

    def _local(self, batch: BatchLike, training: bool) -> _Inputs:
        """This rank's part of each sequence, on its device. Labels are shifted already.

        Host inputs of the model stay on the host. Document ids stay whole, so that cp ranks need not exchange them.
        Extras stay whole, too, and with them the tokens that a model joins to them before it splits the stream.
        """
        wanted = [n for n in self._extra_inputs if n != AFTER_EMBEDDING]
        wanted += [n for n in self._optional if n in batch.extras and n not in wanted]
        here = batch.to(self.meshes.device, stay=self.host_names(batch))
        cut = partial(cut_sequence, axis=self.meshes.cp)  # x itself without cp
        host = {*self._host_inputs} - {*self._extra_inputs}
        whole = {"document_ids"} & host & {*arguments_with_positions(self.model)}
        named = {n: getattr(here, n) for n in self._keywords}
        keywords = {
            n: x if n in whole else cut(x, dim=-1) for n, x in named.items() if x is not None
        }
        if self._sends_ids:
            keywords["token_ids"] = cut(here.tokens, dim=-1)
        extras: dict[str, Any] = {n: here.extras[n] for n in wanted}
        if AFTER_EMBEDDING in self._extra_inputs:
            extras[AFTER_EMBEDDING] = cut
        tokens = here.tokens if self._whole_tokens else cut(here.tokens, dim=-1)
        targets: Targets = (here.labels, here.weights)
        if training and self._ahead:
            further = further_ahead(here, self._ahead)
            keywords["next_tokens"] = cut(further.tokens, dim=-1)
            targets = (*targets, *further.targets)
        if training and self._by_source:
            source: Tensor = cast(Any, here).source  # (B,)
            targets = (*targets, source[:, None].expand_as(here.labels))
        targets = tuple(None if t is None else cut(t, dim=-1) for t in targets)
        return _Inputs(tokens, targets, keywords, extras)

    def _once_per_copy(self, value: Tensor) -> Tensor:
        """A number that is equal on all ranks of a tp group counts on the first of them."""
        alone = self.meshes.tp.rank == 0 or self._head_shares_tokens
        return value if alone else torch.zeros_like(value)


def _of_each_row(loss: Callable[[Tensor, Targets], Tensor], x: Tensor, targets: Targets) -> Tensor:
    """The first sum of a loss for each row of x (B, S, ...) alone: (B,)."""
    rows = [tuple(None if t is None else t[b : b + 1] for t in targets) for b in range(len(x))]
    sums = [loss(x[b : b + 1], row).reshape(-1)[0] for b, row in enumerate(rows)]
    return torch.stack(sums)


def _sources(targets: Targets) -> dict[str, Tensor | None]:
    """The keyword of a loss for the sources of labels, where they stand behind labels and weights."""
    return {"sources": targets[2]} if len(targets) == 3 else {}


def evaluate(
    compute: Compute,
    parts: Sequence[BatchLike],
    count: Callable[[Any], float],
    gather: Callable[[list[float]], list[list[float]]],
) -> float:
    """Mean loss in nats per label over the parts of all ranks, without gradients; the same bits on every rank. nan without
    labels.

        evaluate(compute, parts, lambda part: part.label_weight, agreement.exchange)

    Each part has `compute.rows_at_once` rows, and every rank has as many parts. `count` weighs the labels of a
    part, 0.0 on a rank whose rows another one counts. `gather(value)` returns the values of all ranks, on the
    host. Restores the mode of each module and leaves the weights sharded, so that weights swapped in for the
    evaluation can be swapped back. Costs one host read and one `gather`.
    """
    model, device = compute.model, compute.meshes.device
    total = torch.zeros((), dtype=torch.float64, device=device)
    with evaluation_mode(model):
        for part in parts:
            total += compute.losses(part).double()
    reshard(model)
    shares = gather([float(total), sum(count(part) for part in parts)])
    weight = sum(weight for _, weight in shares)
    return sum(loss for loss, _ in shares) / weight if weight else math.nan


def reader_batches(num_rows: int, batch_size: int, meshes: Meshes) -> list[range]:
    """The sequences of each batch of this reader: batches are the same for any number of readers, which take as many each.

    Those from `num_rows` on are padding: every rank must take part in every gather.
    """
    each = -(-num_rows // (batch_size * meshes.batch_size))
    first = each * meshes.batch_rank
    return [range(i * batch_size, (i + 1) * batch_size) for i in range(first, first + each)]


def evaluate_rows(
    compute: Compute,
    num_rows: int,
    batch_of: Callable[[range], BatchLike],
    gather: Callable[[list[Any]], list[list[Any]]],
) -> list[float]:
    """Sums of token losses in nats of each row, without gradients; of padding after the first `num_rows`.

    `batch_of` makes the batch of some of them. Otherwise as `evaluate`, and each row costs a call of the loss.
    """
    batches = reader_batches(num_rows, compute.rows_at_once, compute.meshes)
    with evaluation_mode(compute.model):
        own = [compute.row_losses(batch_of(numbers)) for numbers in batches]
    reshard(compute.model)
    found: dict[int, float] = {}
    for start, losses in gather([batches[0].start, torch.cat(own).double().tolist()]):
        for row, loss in enumerate(losses, start):  # ranks of one row have a part each
            found[row] = found.get(row, 0.0) + loss
    return [found[row] for row in sorted(found)]


def extra_problems(
    model: nn.Module, batch: BatchLike, layout: Layout, data: str = "the data"
) -> list[Problem]:
    """Why a model cannot get the extras that it declares (`extra_inputs`) from batches of `data`."""
    wanted = [n for n in getattr(model, "extra_inputs", ()) if n != AFTER_EMBEDDING]
    masks = getattr(model, "mask_inputs", ())
    if BRANCH_IDS in batch.extras and BRANCH_IDS not in masks:
        rule = f"would let the branches of a row see each other, and batches of {data} have {BRANCH_IDS}"
        fix = "use a model that takes them (mask_inputs), or data without branches"
        return [Problem("model.name", "branches", ..., rule, fix)]
    missing = [name for name in wanted if name not in batch.extras]
    if missing:
        has = ", ".join(batch.extras) or "none"
        rule = f"takes the extras {', '.join(missing)}, and batches of {data} have {has}"
        return [Problem("model.name", "extras", ..., rule, "use a source that gives them")]
    if layout.cp == 1:
        return []
    given, names = [n for n in masks if n in batch.extras], ", ".join(wanted)
    if given:
        rule = f"cuts the rows whose tokens see each other by {', '.join(given)} of {data}"
        return [Problem("parallel.cp", "mask_inputs", layout.cp, rule, "use cp = 1")]
    if wanted and layout.tp > 1:
        rule = (
            f"splits the stream after the embedding of a model that takes the extras {names}, where tp {layout.tp} has "
            "split it already"
        )
        return [Problem("parallel.cp", "tp", layout.cp, rule, "use cp = 1 or tp = 1")]
    if wanted and AFTER_EMBEDDING not in model.extra_inputs:  # type: ignore[operator]
        rule = f"splits sequences before a model that takes the extras {names} has joined them"
        fix = f"let it name {AFTER_EMBEDDING!r} among its extra_inputs and call that on the stream (B, S, D), or use cp = 1"
        return [Problem("parallel.cp", "after_embedding", layout.cp, rule, fix)]
    return []
