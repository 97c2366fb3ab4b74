"""A replay written down, to be compared with another one: on another machine, of other code, in another layout.

    record.json                   the run, its layout and versions, and the rows of metrics
    step-00000037/rank-0.json     entries in the order of the step: weights before it, outputs, data, gradients
    step-00000037/rank-0.npy      samples of all of them, fp32

An entry has the digest of a whole tensor, its norm, and up to 256 of its elements, evenly spread. Weights and
gradients are whole; outputs of modules are rows (S, ...), by instance, so that every division of the batch gives the same
entries. Where the tokens of a row lie on the ranks of a tp group they are put together.
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
_NO_ROWS = -1


class Entry(NamedTuple):
    """A tensor in a record. `instance` is -1 for what belongs to no single row, `call` counts calls of a module on the
    same rows; `samples` are elements `first .. first + count - 1` of the rank's file."""

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
    """A tensor, or what one rank has of it, as a record has it."""

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
    """Writes each step of a replay into `folder`. Memory: one tensor whole, and the samples of a step."""

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
            self._weights()

    @contextlib.contextmanager
    def around_backward(self, step: int) -> Iterator[None]:
        # a compiled module runs no hooks
        self.watches_modules = not self.trainer.config.parallel.compile
        if step < self.first or not self.watches_modules:
            yield
            return
        with _Outputs(self).watched():
            yield

    def after_backward(self, step: int, batch: Batch) -> None:
        if step < self.first:
            return
        named = self.trainer.model.named_parameters()
        self._whole("gradient", [(n, p.grad) for n, p in named if p.grad is not None])
        self._data(batch)

    def after_step(self, step: int) -> None:
        if step >= self.first:
            self._write(step)

    def finish(self) -> None:
        self._weights()
        self._write(self.trainer.progress.step + 1)

    def write_head(self, start: int, callbacks: bool) -> None:
        """Write record.json, on rank 0: the rows are complete when the replay has ended."""
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
        """Add a tensor, which may change afterwards."""
        plain = value.detach().to("cpu").contiguous().reshape(-1)
        samples = plain[:: max(1, -(-len(plain) // _SAMPLES))].float().clone()
        digest = hashlib.sha256(plain.view(torch.uint8).numpy().data).hexdigest()[:16]
        norm = float(torch.linalg.vector_norm(plain.double())) if len(plain) else 0.0
        dtype = str(value.dtype).removeprefix("torch.")
        place = (self._count, len(samples))
        self.entries.append(
            Entry(kind, name, instance, call, tuple(value.shape), dtype, digest, norm, *place)
        )
        self._samples.append(samples)
        self._count += len(samples)

    def _weights(self) -> None:
        reshard(self.trainer.model)
        self._whole("weight", list(self.trainer.model.named_parameters()))

    def _data(self, batch: Batch) -> None:
        """Rows of the batch, whose digest is of their numbers alone."""
        if not self.trainer.meshes.is_batch_leader:
            return
        fields = {"tokens": batch.tokens, "labels": batch.labels, "weights": batch.weights}
        for name, value in {**fields, **batch.extras}.items():
            if isinstance(value, Tensor):
                for instance, row in zip(batch.instance_ids.tolist(), value):
                    if instance >= 0:
                        self.add("data", name, row, instance)

    def _whole(self, kind: str, named: list[tuple[str, Any]]) -> None:
        """Whole tensors, one at a time; of the ranks with the same layers one writes them. Collective."""
        meshes = self.trainer.meshes
        writes = meshes.batch_rank == meshes.tp.rank == meshes.cp.rank == 0
        for name, value in named:
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            if writes:
                self.add(kind, name, whole)

    def _write(self, step: int) -> None:
        folder = self.folder / f"step-{step:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        stem = folder / f"rank-{self.trainer.meshes.rank}"
        samples = torch.cat(self._samples) if self._samples else torch.empty(0)
        np.save(stem.with_suffix(".npy"), samples.numpy(), allow_pickle=False)
        stem.with_suffix(".json").write_text(json.dumps(self.entries))
        self.entries, self._samples, self._count = [], [], 0


class _Outputs:
    """Outputs of modules in one step, by the instances of their rows."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._trainer = recorder, recorder.trainer
        self._calls: dict[str, int] = {}
        self._first = len(recorder.entries)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        modules = self._trainer.model.named_modules()
        hooks = [m.register_forward_hook(partial(self._note, n or "(model)")) for n, m in modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self._name_instances()

    def _note(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        value = output[0] if isinstance(output, tuple | list) and output else output
        value = getattr(value, "logits", value)
        if not isinstance(value, Tensor) or value.is_meta or is_recomputing():
            return
        number = self._calls[name] = self._calls.get(name, -1) + 1
        rows = self._rows(value.detach())
        if rows is None:
            self._recorder.add("output", name, value, _NO_ROWS, number)
            return
        for row, part in enumerate(rows):  # of which instances is known when all calls are counted
            self._recorder.add("output", name, part, row, number)

    def _rows(self, value: Any) -> Tensor | None:
        """The value of a micro-batch, its rows first; None for one that has no rows, such as a loss."""
        trainer = self._trainer
        rows, tp, batch = trainer.run.compute.micro_batch, trainer.meshes.tp, self._recorder.batch
        assert batch is not None
        length = batch.tokens.size(1) // trainer.meshes.cp.size
        if value.dim() == 2 and value.size(0) == rows * length:  # (B * S, E) of routers
            value = value.unflatten(0, (rows, length))
        if value.dim() < 3 or value.size(0) != rows:
            return None
        if tp.size > 1 and value.dim() == 3 and value.size(1) * tp.size == length:
            parts = [torch.empty_like(value) for _ in range(tp.size)]
            dist.all_gather(parts, value.contiguous(), group=tp.group)
            value = torch.cat(parts, dim=1)
        found: Tensor = value
        return found

    def _name_instances(self) -> None:
        """Give rows their instances: of the calls of a module in a step each micro-batch has as many, in order."""
        batch, rows = self._recorder.batch, self._trainer.run.compute.micro_batch
        assert batch is not None
        ids, entries, found = batch.instance_ids.tolist(), self._recorder.entries, []
        for entry in entries[self._first :]:
            if entry.kind == "output" and entry.instance != _NO_ROWS:
                each = max(1, (self._calls[entry.name] + 1) // (len(ids) // rows))
                instance = ids[entry.call // each * rows + entry.instance]
                if instance < 0:  # filler
                    continue
                entry = entry._replace(instance=instance, call=entry.call % each)
            found.append(entry)
        entries[self._first :] = found


class Record:
    """A record that is read. ConfigError for a folder that is none."""

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
        """{name: {(instance, call): what each rank has of it}} in the order of the step."""
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
