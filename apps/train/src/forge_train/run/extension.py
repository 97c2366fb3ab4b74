"""Optional features of a run: the protocol of their hooks, and the calls of all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor

from forge_data import Batch
from forge_parallel.profile import span
from forge_train._shared.problems import Problem
from forge_train.config.schema import JobConfig
from forge_train.run.run import Run


class Extension:
    """A feature of a run that the training loop does not know. All methods do nothing: override what you need.

        class Trace(Extension):
            name = "trace"
            def after_step(self, step): ...

        Trainer(job, extensions=[Trace()]).fit()

    Each rank has its own objects, the same ones in the same order, and each hook is called on all ranks. What a hook may
    do, in addition to reading:

    | hook | called | collectives | waits for the device | changes weights |
    |---|---|---|---|---|
    | problems | before anything is opened or started | no | no | no |
    | around_run | around all of it, from before the checkpoint is loaded | no | no | no |
    | checkpoint_objects | before the checkpoint is loaded | no | no | no |
    | after_load | the state is loaded, at the start or to go back; `start` is to come | yes | yes | yes |
    | start | before the first step; the checkpoint is loaded, files are open | yes | yes | yes |
    | around_step | around a step and what follows it, up to the next one | no | no | no |
    | before_batch | before the loader is read | yes | yes | no |
    | before_forward | before the first forward of a step | yes | if due | no |
    | token_counts | while the batch is read; the sums of all ranks go to `set_token_counts` | no | no | no |
    | set_token_counts | before the first backward | no | no | no |
    | around_backward | around forward and backward of the step | no | no | no |
    | after_backward | gradients are those of the global batch, not yet clipped | yes | no | no |
    | on_row | the numbers of a row are on the host; weights are still those of its step | no | no | no |
    | after_update | after the optimizer's step, which is masked where `bad` is 1 | yes | no | buffers |
    | wants_row | after the update | no | no | no |
    | numbers | after the update of a step that has a row; gradients are gone: keep their numbers in `after_backward` | yes | no | no |
    | columns | with the same numbers, on the host, one step later | no | no | no |
    | after_step | between steps | yes | yes | yes |
    | before_save | before the state is saved | yes | yes | no |
    | after_rollback | the run went back to the checkpoint of a step; states are loaded | yes | yes | no |
    | on_saved, on_evaluated | between steps: a checkpoint is committed, a set is evaluated | yes | yes | yes |
    | after_evaluation | the model ran on validation data | no | no | no |
    | weights_may_have_changed | after hooks of users | no | no | no |
    | finish | after the last save | yes | yes | no |

    If due: a check of every so many steps may. Rules. Whether a hook communicates follows from the configuration, the step and decisions of all ranks, never from the
    data of one rank: else ranks wait for each other forever. A JobError that all ranks raise alike ends the run with its
    code; any other error ends it, too. The hooks of `_IN_ORDER` and `around_*` are called in the order of the list, the others in
    reverse. The number of a step counts from 1; between steps it is that of the step that was done.

    An extension with `state_dict` and `load_state_dict` is saved in checkpoints as `extension.<name>`. The state is
    loaded before `start`; a checkpoint without one leaves the object as it is.
    """

    name = ""
    """Key of its state; unique in a run."""

    def problems(self, config: JobConfig, world_size: int, total_steps: int) -> Iterable[Problem]:
        """What the feature rejects in a job; the same on all ranks."""
        return ()

    def around_run(self, run: Run) -> AbstractContextManager[Any] | None:
        """A context manager around the run, or None."""
        return None

    def checkpoint_objects(self, objects: dict[str, Any]) -> dict[str, Any]:
        """The objects of checkpoints by name, in place of `objects`."""
        return objects

    def after_load(self, step: int) -> None:
        """The checkpoint of `step` is loaded; -1: the state is the initial one, without a checkpoint."""

    def start(self, run: Run) -> None:
        """The run is about to train its next step."""

    def around_step(self, step: int) -> AbstractContextManager[Any] | None:
        """A context manager around step `step`, or None."""
        return None

    def before_batch(self, step: int) -> None:
        """Step `step` begins."""

    def before_forward(self, step: int, batch: Batch) -> None:
        """This rank has read `batch` for step `step`."""

    def token_counts(self, batch: Batch) -> Sequence[int]:
        """This rank's summands of numbers of the global batch, the same number of them on each rank and in each step."""
        return ()

    def set_token_counts(self, sums: Sequence[int]) -> None:
        """The sums of `token_counts` over all ranks."""

    def around_backward(self, step: int) -> AbstractContextManager[Any] | None:
        """A context manager around forward and backward of step `step`, or None."""
        return None

    def after_backward(self, step: int, batch: Batch) -> None:
        """The gradients of step `step` are complete; `batch` has this rank's rows."""

    def after_update(self, step: int, bad: Tensor) -> None:
        """The optimizer's step was called; `bad` (0-dim, on the device) is 1.0 where it changed nothing."""

    def wants_row(self, step: int) -> bool:
        """Whether step `step` has a row whatever `metrics.every_steps` says; the same on all ranks."""
        return False

    def numbers(self, step: int) -> Tensor | None:
        """Numbers of the row of step `step`, flat, on the device, or None."""
        return None

    def columns(self, numbers: Sequence[float]) -> Mapping[str, Any]:
        """Columns of a row, by name, from its `numbers`."""
        return {}

    def on_row(self, row: Mapping[str, Any]) -> None:
        """A row of metrics.jsonl is complete."""

    def after_step(self, step: int) -> None:
        """Step `step` was done."""

    def before_save(self, step: int) -> None:
        """Step `step` is about to be saved."""

    def on_saved(self, step: int, path: Path) -> None:
        """The checkpoint of `step` is committed at `path`, perhaps some steps later."""

    def on_evaluated(self, name: str, value: float) -> None:
        """A set of validation data was evaluated: its loss in nats per token."""

    def after_evaluation(self) -> None:
        """The model ran on data that is not trained: drop what was counted of it."""

    def weights_may_have_changed(self) -> None:
        """A hook of a user was called: what is known of weights may hold no longer."""

    def after_rollback(self, step: int) -> None:
        """The run went back to the checkpoint of `step`: drop what is known of later steps."""

    def finish(self) -> None:
        """The run is over, done or stopped."""


#: Hooks that are called in the order of the list; the others in reverse.
_IN_ORDER = (
    "checkpoint_objects",
    "after_load",
    "start",
    "before_batch",
    "before_forward",
    "token_counts",
    "before_save",
)
#: Hooks in which a user may run the model, or change its weights.
_BETWEEN_STEPS = frozenset(
    {"start", "on_row", "after_step", "before_save", "on_saved", "on_evaluated", "after_rollback", "finish"}
)  # fmt: skip


class Extensions:
    """The extensions of a run. Of each hook only those are called that override it, so a plain run calls nothing.

    `changed`: called after hooks of `users` in which they may have run the model or changed its weights.
    """

    def __init__(
        self,
        extensions: Sequence[Extension],
        users: Sequence[Extension] = (),
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._all, self._users, self._changed = list(extensions), {id(e) for e in users}, changed
        self._hooks: dict[str, list[Extension]] = {}

    def __iter__(self) -> Iterator[Extension]:
        return iter(self._all)

    def __bool__(self) -> bool:
        return bool(self._all)

    def of(self, hook: str) -> list[Extension]:
        """Those that override a hook, in the order of their calls."""
        found = self._hooks.get(hook)
        if found is None:
            base = getattr(Extension, hook)
            found = [e for e in self._all if getattr(type(e), hook, base) is not base]
            self._hooks[hook] = found = found if hook in _IN_ORDER else found[::-1]
        return found

    def call(self, hook: str, *args: Any) -> None:
        """Call a hook of all that have it."""
        for extension in self.of(hook):
            if id(extension) not in self._users:
                getattr(extension, hook)(*args)
                continue
            with span("hooks"):
                getattr(extension, hook)(*args)
            if hook in _BETWEEN_STEPS:
                self._changed()
                self.call("weights_may_have_changed")

    def problems(self, config: JobConfig, world_size: int, total_steps: int) -> Iterator[Problem]:
        """Those of all extensions."""
        for extension in self.of("problems"):
            yield from extension.problems(config, world_size, total_steps)

    def checkpoint_objects(self, objects: dict[str, Any]) -> dict[str, Any]:
        """The objects of checkpoints, each extension having replaced some."""
        for extension in self.of("checkpoint_objects"):
            objects = extension.checkpoint_objects(objects)
        return objects

    def token_counts(self, batch: Batch) -> tuple[int, ...]:
        """Those of all extensions, one after another."""
        self._sizes = []
        found: list[int] = []
        for extension in self.of("token_counts"):
            counts = extension.token_counts(batch)
            self._sizes.append((extension, len(counts)))
            found += counts
        return tuple(found)

    def set_token_counts(self, sums: Sequence[int]) -> None:
        """Give each extension the sums of its `token_counts`."""
        start = 0
        for extension, size in self._sizes:
            extension.set_token_counts(sums[start : start + size])
            start += size

    def wants_row(self, step: int) -> bool:
        """Whether one of them asks for a row of a step."""
        return any([extension.wants_row(step) for extension in self.of("wants_row")])

    def numbers(self, step: int) -> dict[str, Tensor]:
        """The numbers of a row, by a key of each extension that has some."""
        found = {self._key(extension): extension.numbers(step) for extension in self.of("numbers")}
        return {key: numbers for key, numbers in found.items() if numbers is not None}

    def columns(self) -> dict[str, Callable[[list[float]], Mapping[str, Any]]]:
        """From those numbers to columns, by the same keys."""
        return {self._key(extension): extension.columns for extension in self.of("numbers")}

    def _key(self, extension: Extension) -> str:
        return f"extension {self._all.index(extension)}"

    @contextlib.contextmanager
    def around(self, hook: str, *args: Any) -> Iterator[None]:
        """The code inside is inside of the context managers of a hook, the first one outermost."""
        with contextlib.ExitStack() as stack:
            for extension in self.of(hook)[::-1]:
                manager = getattr(extension, hook)(*args)
                if manager is not None:
                    stack.enter_context(manager)
            yield
