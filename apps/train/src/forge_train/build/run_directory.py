"""The folder of a run: its files, and the record of how the run was made."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_resilience.provenance import record_environment, recorded_hosts
from forge_train._shared.atomic import write_file
from forge_train._shared.paths import user_path
from forge_train._shared.problems import Problem, invalid
from forge_train._shared.toml_files import flatten, read_toml
from forge_train.config.init import NAME as IMPORTED_MODEL
from forge_train.config.init import committed
from forge_train.config.layers import Layers, read_layers
from forge_train.errors import ConfigError, JobError, refuse, write_errors

if TYPE_CHECKING:  # imports torch, which readers of a run do not need
    from forge_train.build.resolve import ResolvedJob

_DISTRIBUTIONS = ("torch", "numpy", "forge-train", "forge-train-core", "forge-parallel", "forge-moe", "forge-data",
                  "forge-ckpt", "forge-resilience")  # fmt: skip

#: An average may change its decay within a run, and neither begin nor end.
_AVERAGE, _OFF = "optimizer.ema.decay", (None, "none")

# Keys that stay as they are once a run has a checkpoint. A key is fixed where another value gives the saved state another
# meaning: the function that the weights compute, the optimizer's state, which sample an index of the data names. Keys that
# only change how training goes on (learning rates, batch, length, intervals, layouts) are free, and a resume reports them
# as changed. A new key is free unless it is listed here. The lists are not at the fields: packages of the fields know no run.

#: Keys that decide the content of the optimizer's state; a fork that keeps this state must have the same.
OPTIMIZER_KEYS = ("optimizer.name", "optimizer.state_dtype", "parallel.param_dtype")
#: Keys whose change makes another experiment, besides those of [model] and [lora].
FIXED_KEYS = (
    *("run.seed", "init.seed", "init.from", "init.keep", "init.patterns", "init.encoder"),
    *OPTIMIZER_KEYS,
    "data.seq_len",
)
#: All keys of [model] are fixed but those that change no output: the length limit, the initial spread, the weights of
#: further losses, the backend of matmuls.
FREE_MODEL_KEYS = (
    "model.max_seq_len",
    "model.init_std",
    "model.mtp.weight",
    "model.moe.aux_loss_weight",
    "model.moe.sequence_loss_weight",
    "model.moe.z_loss_weight",
    "model.moe.backend",
    "model.moe.dispatcher",
    "model.moe.dispatch_chunks",
)


def is_fixed(key: str) -> bool:
    """Whether a change of a key makes another experiment."""
    if key.startswith("model."):
        return key not in FREE_MODEL_KEYS
    return key in FIXED_KEYS or key.startswith("lora.")


def _is_default(job: ResolvedJob, key: str) -> bool:
    """Whether a key has the value of its field's default, also where a file says so."""
    if job.origin(key) == "default":
        return True
    owner: Any = job.config
    *path, name = key.split(".")
    for part in path:
        owner = owner.get(part) if isinstance(owner, dict) else getattr(owner, part, None)
    fields = dataclasses.fields(owner) if dataclasses.is_dataclass(owner) else ()
    field = next((f for f in fields if f.name.removesuffix("_") == name), None)
    return field is not None and bool(getattr(owner, field.name) == field.default)


def _value(table: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key; "none" within a table that is "none"."""
    inside = any(key.startswith(f"{other}.") for other, value in table.items() if value == "none")
    return "none" if inside else table.get(key)


def _is_table(before: Mapping[str, Any], now: Mapping[str, Any], key: str) -> bool:
    """Whether a key without a value is a table on the other side, whose keys are compared."""
    return any(other.startswith(f"{key}.") for other in (*before, *now))


class RunDirectory:
    """Paths of a run, and the files that describe it.

    config.toml       resolved configuration, each value with its origin
    environment.json  versions, machine, git commit; git.patch is the diff of a dirty tree
    metrics.jsonl     a row per logged step        events.jsonl  starts, saves, stops
    checkpoints/      the store                    sample.txt    text of the trained model
    base/             with [lora]: the frozen weights, a store of one step
    tensorboard/      with metrics.tensorboard      profile/  with [profile]
    model.toml, hf/   of weights from Hugging Face: their model, files for an export
    parent.json       of a fork: the checkpoint that it began from, and what it took of it
    report.html       the page of `forge-train report`
    """

    def __init__(self, path: str | Path) -> None:
        self.path = user_path(path)
        self.config = self.path / "config.toml"
        self.environment = self.path / "environment.json"
        self.patch = self.path / "git.patch"
        self.metrics = self.path / "metrics.jsonl"
        self.events = self.path / "events.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.base = self.path / "base"
        self.sample = self.path / "sample.txt"
        self.profile = self.path / "profile"
        self.parent = self.path / "parent.json"
        self.page = self.path / "report.html"
        self.imported = self.path / IMPORTED_MODEL

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint of a step is once it is committed."""
        return self.checkpoints / f"step-{step:08d}"

    @property
    def host(self) -> str:
        """Name of this machine."""
        return platform.node()

    def create(self, rank: int = 0) -> None:
        """Make the folder and prove that this rank can write it; ConfigError otherwise."""
        fix = "choose a folder that you own, such as --run.dir runs/mine"
        with write_errors("run.dir", self.path, fix):
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".writable-{rank}-{os.getpid()}"
            probe.touch()
            probe.unlink(missing_ok=True)

    def layers(self) -> Layers:
        """The values of config.toml; ConfigError if it cannot be read, or is empty."""
        layers = read_layers(self.config)
        if not layers.values:
            rule, fix = "describes the run, and is empty", "restore it"
            raise invalid("", "damaged", str(self.config), rule, fix, kind=ConfigError)
        return layers

    def changes(self, job: ResolvedJob) -> dict[str, list[Any]]:
        """Key -> [value when the run was last started, value now]; empty for a new run.

        ConfigError if config.toml cannot be read: without it nothing shows whether the checkpoints are of this experiment.
        """
        if not self.config.exists():
            return {}
        try:
            layers = self.layers()
        except ConfigError as error:
            fix = "restore it, remove it to go on unchecked, or choose another run.dir"
            reason = str(error).removeprefix(f"{self.config}: ")
            rule = f"describes this run and cannot be read: {reason}"
            raise invalid("", "damaged", str(self.config), rule, fix, kind=ConfigError) from error

        layers.replace_old_keys()
        before = dict(flatten(layers.values))
        now = dict(flatten(tomllib.loads(job.to_toml())))
        # a key that an older version did not have had the effect of its default
        known = (k for k in now if k in before or not _is_default(job, k))
        keys = [*known, *(k for k in before if k not in now)]
        found = {
            k: [_value(before, k), _value(now, k)] for k in keys if not _is_table(before, now, k)
        }
        return {key: values for key, values in found.items() if values[0] != values[1]}

    def changes_of_import(self, job: ResolvedJob) -> dict[str, list[Any]]:
        """`changes` of a folder that an import wrote and no run has trained: keys of [model] that have a value here."""
        if not self.imported.is_file():
            return {}
        try:
            before = dict(flatten(read_toml(self.imported)))
        except ValueError as error:
            shown, fix = str(self.imported), "import the weights again"
            rule = f"cannot be read: {error}"
            raise invalid("", "imported", shown, rule, fix, kind=ConfigError) from error
        now = dict(flatten(tomllib.loads(job.to_toml())))
        return {k: [v, now[k]] for k, v in before.items() if now.get(k, "none") not in ("none", v)}

    def allowed_changes(self, job: ResolvedJob) -> dict[str, list[Any]]:
        """`changes`; ConfigError if one would make the run another experiment.

        Before the first checkpoint all changes are allowed.
        """
        changes = self.changes(job)
        if not self.has_checkpoints():
            return changes

        rule, fix = "must stay as it was", "set it back or choose another run.dir"
        origin = f"run {self.path}"
        problems = [
            Problem(key, "fixed", now, f"{rule} when the run was started: {before!r}", fix, origin)
            for key, (before, now) in changes.items()
            if is_fixed(key)
        ]

        before, now = changes.get(_AVERAGE, [None, None])
        if (before in _OFF) != (now in _OFF):
            rule = f"must stay {before or 'none'!r}, as an average begins and ends with a run"
            fix = f"set it back, or fork with init.from = {str(self.path)!r} and another run.dir"
            problems.append(Problem(_AVERAGE, "average", now or "none", rule, fix, origin))
        refuse(problems)
        return changes

    def record(
        self, job: ResolvedJob, hosts: Sequence[str], parent: Mapping[str, Any] | None = None
    ) -> None:
        """Write config.toml, environment.json and git.patch, each atomically, and parent.json if `parent` is given.

        `hosts` are the machines of all ranks. Raises JobError when that cannot be written.
        """
        fix = "make room there or choose another folder"
        with write_errors("run.dir", self.path, fix, JobError, room="has no room"):
            write_file(self.config, job.to_toml())
            record_environment(self.path, _DISTRIBUTIONS, hosts)
            if parent is not None:
                write_file(self.parent, json.dumps(parent, indent=2) + "\n")

    def num_ranks(self) -> int | None:
        """Ranks when the run was last started; None for a new run, or if that is not recorded."""
        hosts = recorded_hosts(self.path)
        return None if hosts is None else len(hosts)

    def committed(self) -> dict[int, Path]:
        """Step -> folder of the committed checkpoints."""
        return committed(self.path)

    def has_checkpoints(self) -> bool:
        """True once a step was committed."""
        return bool(self.committed())

    def require_run(self) -> None:
        """Raise ConfigError for a folder that no run has trained in."""
        shown = str(self.path)
        if self.imported.exists() and not self.config.exists():
            rule = "is an import that no run has trained"
            fix = f"generate from the folder that was imported, or train first: forge-train run JOB.toml --run.dir {shown}"
            raise invalid("run_dir", "untrained", shown, rule, fix, kind=ConfigError)
        if not self.config.exists():
            rule, fix = f"has no {self.config.name}", "name the folder of a run, as in run.dir"
            raise invalid("run_dir", "not_found", shown, rule, fix, kind=ConfigError)
