"""A replay as a record, to be compared with another one: of another machine, other code or another layout.

    record.json                   the run, its layout and versions, and the rows of metrics
    step-00000037/rank-0.json     entries in the order of the step: weights before it, outputs, data, gradients
    step-00000037/rank-0.npy      samples of all of them, fp32

An entry has the digest of a full tensor, its norm, and up to 256 of its elements, evenly spread. Weights and
gradients are unsharded; outputs of modules are of single sequences (S, ...), by sample index, so that every division of
the batch gives the same entries. A sequence that is sharded over a tp group is gathered.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_data import Batch
from forge_lab._shared.problems import invalid
from forge_lab._shared.toml_files import read_toml
from forge_lab.study.replay import Replay
from forge_parallel import reshard
from forge_parallel.recompute import is_recomputing
from forge_train.errors import ConfigError

FORMAT = 1
_SAMPLES = 256
_NO_ROWS = -1  # `Entry.instance` of a tensor that belongs to no single sequence


class Entry(NamedTuple):
    """A tensor in a record; its samples are elements `start .. start + length - 1` of the rank's file.

    `instance` is the sample index of a sequence, or -1; `call` counts calls of a module on the same sequences.
    """

    kind: str  # "weight", "data", "output" or "gradient"
    name: str
    instance: int
    call: int
    shape: tuple[int, ...]
    dtype: str
    digest: str
    norm: float
    start: int
    length: int


class Part(NamedTuple):
    """A tensor of a record, or one rank's shard of it."""

    shape: tuple[int, ...]
    dtype: str
    digest: str
    norm: float
    samples: np.ndarray


@dataclass(frozen=True)
class Head:
    """The content of record.json. `rows` are rows of metrics by step; weights are also those before step `last + 1`."""

    format: int
    run: str
    start: int
    first: int
    last: int
    world_size: int
    layout: dict[str, Any]
    device: str
    environment: dict[str, Any]
    callbacks: bool
    watches_modules: bool
    rows: dict[str, dict[str, Any]]


class Recorder(Replay):
    """Writes each step of a replay into `folder`. Memory: one unsharded tensor, and the samples of a step."""

    def __init__(self, folder: Path, run: Path, first: int, last: int) -> None:
        super().__init__(run, first, last)
        self.folder, self.run = folder, run
        self.watches_modules = True
        self.entries: list[Entry] = []
        self._samples: list[Tensor] = []
        self._count = 0

    def before_batch(self, step: int) -> None:
        super().before_batch(step)
        if step >= self.first:
            self._add_weights()

    @contextlib.contextmanager
    def around_backward(self, step: int) -> Iterator[None]:
        # compiled modules run no hooks
        self.watches_modules = not self.trainer.config.parallel.compile
        if step < self.first or not self.watches_modules:
            yield
            return
        with _ModuleOutputs(self).watched():
            yield

    def after_backward(self, step: int, batch: Batch) -> None:
        if step < self.first:
            return
        named = self.trainer.model.named_parameters()
        self._add_unsharded("gradient", [(n, p.grad) for n, p in named if p.grad is not None])
        self._add_data(batch)

    def after_step(self, step: int) -> None:
        if step >= self.first:
            self._write(step)

    def finish(self) -> None:
        self._add_weights()
        self._write(self.trainer.progress.step + 1)

    def write_head(self, start: int, callbacks: bool) -> None:
        """Write record.json, on rank 0, when the replay has ended and the rows are complete."""
        trainer = self.trainer
        if trainer.meshes.rank:
            return

        head = Head(
            format=FORMAT,
            run=str(self.run),
            start=start,
            first=self.first,
            last=self.last,
            world_size=trainer.meshes.world_size,
            layout=read_toml(trainer.paths.config).get("parallel", {}),
            device=trainer.run.device.type,
            environment=json.loads(trainer.paths.environment.read_text()),
            callbacks=callbacks,
            watches_modules=self.watches_modules,
            rows={str(step): row for step, row in self.rows.items()},
        )
        (self.folder / "record.json").write_text(json.dumps(asdict(head), indent=1) + "\n")

    def add(self, kind: str, name: str, value: Tensor, instance: int = -1, call: int = 0) -> None:
        """Add a tensor, which may change afterwards. Copies it to the CPU."""
        flat = value.detach().to("cpu").contiguous().reshape(-1)
        samples = flat[:: max(1, -(-len(flat) // _SAMPLES))].float().clone()
        digest = hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()[:16]
        norm = float(torch.linalg.vector_norm(flat.double())) if len(flat) else 0.0
        dtype, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
        start, length = self._count, len(samples)
        self.entries.append(
            Entry(kind, name, instance, call, shape, dtype, digest, norm, start, length)
        )
        self._samples.append(samples)
        self._count += length

    def _add_weights(self) -> None:
        reshard(self.trainer.model)
        self._add_unsharded("weight", list(self.trainer.model.named_parameters()))

    def _add_data(self, batch: Batch) -> None:
        """Add the sequences of the batch; the digest of a row of metrics covers only their sample indices."""
        if not self.trainer.meshes.is_batch_leader:
            return
        fields = {"tokens": batch.tokens, "labels": batch.labels, "weights": batch.weights}
        for name, value in {**fields, **batch.extras}.items():
            if isinstance(value, Tensor):
                for instance, sequence in zip(batch.instance_ids.tolist(), value):
                    if instance >= 0:
                        self.add("data", name, sequence, instance)

    def _add_unsharded(self, kind: str, named: list[tuple[str, Any]]) -> None:
        """Gather tensors, one at a time; one of the ranks with the same layers adds them. Collective."""
        meshes = self.trainer.meshes
        writes = meshes.batch_rank == meshes.tp.rank == meshes.cp.rank == 0
        for name, value in named:
            full = value.full_tensor() if hasattr(value, "full_tensor") else value
            if writes:
                self.add(kind, name, full)

    def _write(self, step: int) -> None:
        folder = self.folder / f"step-{step:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        stem = folder / f"rank-{self.trainer.meshes.rank}"
        samples = torch.cat(self._samples) if self._samples else torch.empty(0)
        np.save(stem.with_suffix(".npy"), samples.numpy(), allow_pickle=False)
        stem.with_suffix(".json").write_text(json.dumps(self.entries))
        self.entries, self._samples, self._count = [], [], 0


class _ModuleOutputs:
    """Adds the outputs of modules in one step, by sequence and sample index."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._trainer = recorder, recorder.trainer
        self._calls: dict[str, int] = {}
        self._first = len(recorder.entries)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        modules = self._trainer.model.named_modules()
        hooks = [m.register_forward_hook(partial(self._add, n or "(model)")) for n, m in modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self._name_instances()

    def _add(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        value = output[0] if isinstance(output, tuple | list) and output else output
        value = getattr(value, "logits", value)
        if not isinstance(value, Tensor) or value.is_meta or is_recomputing():
            return
        call = self._calls[name] = self._calls.get(name, -1) + 1
        sequences = self._by_sequence(value.detach())
        if sequences is None:
            self._recorder.add("output", name, value, _NO_ROWS, call)
            return
        # indices within the micro-batch; `_name_instances` replaces them when all calls are counted
        for index, sequence in enumerate(sequences):
            self._recorder.add("output", name, sequence, index, call)

    def _by_sequence(self, value: Any) -> Tensor | None:
        """A micro-batch's output as (B, S, ...); None for one without sequences, such as a loss."""
        trainer = self._trainer
        size, tp, batch = trainer.run.compute.micro_batch, trainer.meshes.tp, self._recorder.batch
        assert batch is not None
        length = batch.tokens.size(1) // trainer.meshes.cp.size
        if value.dim() == 2 and value.size(0) == size * length:
            value = value.unflatten(0, (size, length))  # (B * S, E) of routers -> (B, S, E)
        if value.dim() < 3 or value.size(0) != size:
            return None

        if tp.size > 1 and value.dim() == 3 and value.size(1) * tp.size == length:
            shards = [torch.empty_like(value) for _ in range(tp.size)]
            dist.all_gather(shards, value.contiguous(), group=tp.group)
            value = torch.cat(shards, dim=1)  # (B, S / tp, M) -> (B, S, M)
        found: Tensor = value
        return found

    def _name_instances(self) -> None:
        """Replace indices within micro-batches by sample indices: each micro-batch calls a module equally often."""
        batch, size = self._recorder.batch, self._trainer.run.compute.micro_batch
        assert batch is not None
        ids, entries, found = batch.instance_ids.tolist(), self._recorder.entries, []
        for entry in entries[self._first :]:
            if entry.kind == "output" and entry.instance != _NO_ROWS:
                each = max(1, (self._calls[entry.name] + 1) // (len(ids) // size))
                instance = ids[entry.call // each * size + entry.instance]
                if instance < 0:  # padding
                    continue
                entry = entry._replace(instance=instance, call=entry.call % each)
            found.append(entry)
        entries[self._first :] = found


class Record:
    """Reads a record. ConfigError for another folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            found = json.loads((folder / "record.json").read_text())
            if found["format"] != FORMAT:
                raise ValueError(f"format {found['format']}")
            self.head = Head(**found)
        except (OSError, ValueError, KeyError, TypeError) as error:
            rule = f"must be a record of format {FORMAT} ({error})"
            fix = "write one: forge-train replay RUN --step N --record DIR"
            raise invalid("record", "damaged", str(folder), rule, fix, kind=ConfigError) from error

    def row(self, step: int) -> dict[str, Any]:
        """The row of metrics of a step."""
        return self.head.rows[str(step)]

    def entries(self, step: int, kind: str) -> dict[str, dict[tuple[int, int], list[Part]]]:
        """{name: {(instance, call): the tensor or shard of each rank}} in the order of the step."""
        found: dict[str, dict[tuple[int, int], list[Part]]] = {}
        folder = self.folder / f"step-{step:08d}"
        for rank in range(self.head.world_size):
            samples = np.load(folder / f"rank-{rank}.npy", allow_pickle=False)
            for fields in json.loads((folder / f"rank-{rank}.json").read_text()):
                e = Entry(*fields)
                if e.kind == kind:
                    values = samples[e.start : e.start + e.length]
                    part = Part(tuple(e.shape), e.dtype, e.digest, e.norm, values)
                    found.setdefault(e.name, {}).setdefault((e.instance, e.call), []).append(part)
        return found
