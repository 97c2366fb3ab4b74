"""Train a step of a run again, exactly, and inspect it: the run's folder is only read."""

from __future__ import annotations

import bdb
import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from forge_data import Batch
from forge_data.documents import documents_of
from forge_data.run_checks import tokenizer_of
from forge_lab._shared.problems import invalid, problems_of
from forge_lab.study.private_job import find_start, merge_changes, private_job, read_journal
from forge_parallel import StartError, launch
from forge_resilience import ExitCode, StopSignal
from forge_train import Callback, ResolvedJob, RunDirectory, Trainer, read_rows
from forge_train.errors import ConfigError, JobError, StateError

#: Numbers of a row that a replay must reproduce.
COMPARED = ("loss", "grad_norm", "lr", "instances")

#: Keys that decide how a step is computed.
_COMPUTES = ("parallel.", "train.", "model.", "optimizer.", "schedule.", "data.", "resilience.non", "resilience.spike.", "resilience.roll")  # fmt: skip
_CHARACTERS = 60  # of each document of a sequence
_TOKENS = 40  # enough for so many characters

#: Called with the Trainer before a step; a context manager that it returns is exited after the step.
Hook = Callable[[Trainer], Any]


@dataclass(frozen=True)
class SeenRow:
    """A sequence of a global batch: its sample index, its source and its documents.

    `documents` are their numbers in the source, None where the source does not number them. `texts` are the first
    characters of each document in the sequence; ids without a tokenizer.
    """

    instance: int
    source: str
    documents: list[int] | None
    texts: list[str]


class Replay(Callback):
    """Follows the rollbacks of a run in its private job, and records the steps from `first` to `last`.

    rows: rows of metrics by step; batch: the batch of this rank in the newest step.
    """

    def __init__(self, run: Path, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.rows: dict[int, dict[str, Any]] = {}
        self.batch: Batch | None = None
        self._rollbacks = {event["to_step"]: event for event in read_journal(run).rollbacks}

    def before_batch(self, step: int) -> None:
        """Skip the data that a rollback of the run skipped, and count the rollback."""
        back = self._rollbacks.get(step - 1)
        if back is not None:
            self.trainer.loader.skip_rest(back["skipped_instances"])
            self.trainer.progress.policy.rollbacks = back["rollbacks"]

    def before_forward(self, step: int, batch: Batch) -> None:
        self.batch = batch

    def wants_row(self, step: int) -> bool:
        return step >= self.first

    def on_row(self, row: Mapping[str, Any]) -> None:
        self.rows[row["step"]] = dict(row)


@dataclass(frozen=True)
class Replayed:
    """A step that was trained again.

    `row` is its row of metrics, `logged` the row of the run, or None. `seen` are the sequences of the global batch with
    their documents. `start` is the step of the checkpoint that the replay began from, 0 for the initial state. `changed`
    is {key: [value when the run trained the step, value here]}. `trainer` is in its state after the step; on one process
    its model and data stay usable.
    """

    step: int
    start: int
    row: Mapping[str, Any]
    logged: Mapping[str, Any] | None
    seen: Sequence[SeenRow]
    changed: Mapping[str, list[Any]] = field(repr=False)
    trainer: Trainer = field(repr=False)

    @property
    def differs(self) -> dict[str, tuple[Any, Any]]:
        """{name: (logged, replayed)} of the compared numbers that are not bit-equal."""
        if self.logged is None:
            return {}
        pairs = {n: (self.logged.get(n), self.row.get(n)) for n in COMPARED}
        return {n: pair for n, pair in pairs.items() if pair[0] != pair[1]}


class OneStep(Replay):
    """Hooks, anomaly mode and a breakpoint around one step; `seen` are the sequences that it read."""

    def __init__(
        self, run: Path, step: int, hooks: Sequence[Hook], anomaly: bool, debugger: bool
    ) -> None:
        super().__init__(run, step, step)
        self.hooks, self.anomaly, self.debugger = hooks, anomaly, debugger
        self.seen: list[SeenRow] = []

    @contextlib.contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        trainer = self.trainer  # the name that is typed in the debugger
        with contextlib.ExitStack() as stack:
            for hook in self.hooks if step == self.first else ():
                found = hook(trainer)
                if isinstance(found, contextlib.AbstractContextManager):
                    stack.enter_context(found)
            if self.anomaly and step == self.first:
                stack.enter_context(torch.autograd.set_detect_anomaly(True))
            if self.debugger and step == self.first:
                breakpoint()  # `next` trains the step
            yield

    def after_step(self, step: int) -> None:
        if step == self.first:
            self.seen = self._seen_rows()

    def _seen_rows(self) -> list[SeenRow]:
        """The sequences of the step on all ranks, by sample index. Collective."""
        trainer, own = self.trainer, list[dict[str, Any]]()
        if self.batch is not None and trainer.meshes.is_batch_leader:
            sources = trainer.config.data.sources
            for row in documents_of(trainer.loader.stream, self.batch):
                source = next(iter(sources)) if len(sources) == 1 else row.source
                decode: Callable[[Any], str]
                try:
                    decode = tokenizer_of(sources[source]).decode
                except (KeyError, ValueError):  # ids without text
                    decode = _ids_as_text
                texts = [decode(tokens[:_TOKENS])[:_CHARACTERS] for tokens in row.tokens]
                documents = None if row.documents is None else list(row.documents)
                own.append(asdict(SeenRow(row.instance, source, documents, texts)))
        rows = [SeenRow(**row) for rank in trainer.run.agreement.exchange(own) for row in rank]
        return sorted(rows, key=lambda row: row.instance)


def _ids_as_text(ids: Any) -> str:
    return " ".join(map(str, ids))


def replay_step(
    run: str | Path,
    step: int,
    *,
    hooks: Sequence[Hook] = (),
    anomaly: bool = False,
    debugger: bool = False,
    callbacks: bool = False,
    settings: Mapping[str, Any] | None = None,
    output: str | Path | None = None,
) -> Replayed:
    """Train step `step` of a run again, from its newest checkpoint before that step, or else from its initial state.

        found = replay_step("runs/mine", 37, hooks=[lambda trainer: store.watch(trainer.model)])
        found.differs       # {} : loss, norm, learning rate and data are bit-equal to the logged ones

    On the layout of the run the step is bit-equal to the run's. `settings` may name another layout (dotted keys). Nothing
    is saved, evaluated or sent to sinks; callbacks of the job are off unless `callbacks`, as they may act outside. The
    trainer writes its configuration and events to `output`, by default a temporary folder. Under a launcher every
    rank calls it with the same new `output` on a file system that all ranks see.

    Costs the steps from the checkpoint on. Raises ConfigError and StateError.
    """
    start = find_start(Path(run), step)
    replay = OneStep(Path(run), step, hooks, anomaly, debugger)
    with private_folder(run, output) as folder:
        job = private_job(Path(run), start, folder, settings, callbacks)
        try:
            trainer = train_again(job, replay)
        except bdb.BdbQuit:
            raise JobError([f"the debugger was left before the end of step {step}"]) from None

    logged = logged_rows(Path(run)).get(step)
    changed = changed_since(Path(run), step, job, trainer.meshes.world_size)
    return Replayed(step, start, replay.rows[step], logged, replay.seen, changed, trainer)


def train_again(job: ResolvedJob, replay: Replay) -> Trainer:
    """Train the private job of a run to the end of the replay's last step; nothing is saved or evaluated.

    Uses the process group that runs, or starts and ends one. JobError where a signal stopped it before.
    """
    trainer = Trainer(job, [replay], until=replay.last, saves=False, evaluates=False)
    try:
        with contextlib.ExitStack() as stack:
            stop = stack.enter_context(StopSignal(announce=False))  # nothing is saved
            begun = dist.is_initialized()
            launched = {"configuration": job.digest()}
            meshes = None if begun else stack.enter_context(launch(job.config.parallel, launched))
            step = trainer.fit(meshes, stop).step
    except StartError as error:
        failure = JobError(problems_of(error))
        failure.shared = error.shared
        raise failure from error

    if step < replay.last:
        stopped = JobError([f"stopped by a signal after step {step}"])
        stopped.exit_code, stopped.shared = ExitCode.REQUEUE, True
        raise stopped
    return trainer


@contextlib.contextmanager
def private_folder(run: str | Path, output: str | Path | None) -> Iterator[Path]:
    """`output`, which must be new and outside of the run, or a temporary folder."""
    if output is None:
        with tempfile.TemporaryDirectory(prefix="forge-replay-") as temporary:
            yield Path(temporary)
        return
    folder, inside = Path(output), Path(run).resolve()
    if inside in (folder.resolve(), *folder.resolve().parents):
        rule, fix = f"must be outside of {run}, which is only read", "name a folder elsewhere"
        raise invalid("--output", "inside", str(output), rule, fix, kind=ConfigError)
    if RunDirectory(folder).config.exists():
        rule, fix = "holds a replay or a run already", "name a new folder"
        raise invalid("--output", "exists", str(output), rule, fix, kind=StateError)
    yield folder


def logged_rows(run: Path) -> dict[int, dict[str, Any]]:
    """Rows of a run's metrics.jsonl by step."""
    path = RunDirectory(run).metrics
    return {row["step"]: row for row in read_rows(path)} if path.exists() else {}


def changed_since(run: Path, step: int, job: ResolvedJob, ranks: int) -> dict[str, list[Any]]:
    """{key: [value when the run trained `step`, value here]} of `world_size` and of keys that decide how it computes."""
    journal = read_journal(run)
    world_size = {"world_size": [journal.world_size_of(step) or ranks, ranks]}
    changes = (journal.changed_since(step), RunDirectory(run).changes(job))
    of_step = [{k: v for k, v in each.items() if k.startswith(_COMPUTES)} for each in changes]
    return merge_changes(world_size, *of_step)
