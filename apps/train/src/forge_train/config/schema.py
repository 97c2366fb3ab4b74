"""The typed, validated description of a whole job; every section is the config of one component.

To add a key, write `field(default, between=(lowest, highest))` in its section and its help below it: flag, type check, range,
`forge-train keys` and docs/configuration.md (`python scripts/write_configuration_page.py`) follow from them. A rule between
keys of a section is one of its `_problems`, a rule between sections one of `build/rules.py`. Keys that are fixed once a run has
a checkpoint are listed in `build/run_directory.py`; keys that change the learning rate of a step in `loop/start.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from forge_core import OptimizerConfig, ScheduleConfig
from forge_core.loss import CrossEntropyConfig
from forge_core.optim import StageConfig
from forge_data import DataConfig
from forge_parallel import ParallelConfig
from forge_parallel.profile import ProfileConfig
from forge_resilience.alerts import AlertsConfig
from forge_resilience.health import HealthConfig
from forge_resilience.policy import NonfiniteConfig, RollbackConfig, SpikeConfig
from forge_resilience.replicas import ReplicasConfig
from forge_resilience.slurm import SlurmConfig
from forge_resilience.supervise import WatchConfig
from forge_train._shared.fields import Checked, field, range_problems
from forge_train._shared.paths import expand_fields
from forge_train._shared.problems import Problem
from forge_train.config.evaluation import EvalConfig
from forge_train.config.init import InitConfig
from forge_train.config.layers import LENGTH_KEYS
from forge_train.config.model import LoRASection, ModelSection

if TYPE_CHECKING:
    from forge_ckpt import Keep


_SEED = (0, 2**63 - 1)
_FROM_0, _FROM_1 = (0, 10**9), (1, 10**9)  # of steps
_BATCH = (1, 2**20)


@dataclass(frozen=True)
class RunConfig(Checked):
    """The folder of a run and its seed."""

    dir: str = field("runs/default", path=True)
    """folder of this run: config, metrics, events, checkpoints"""
    seed: int = field(0, between=_SEED)
    """seed of random numbers, and of what has no seed of its own: init.seed, data.seed"""

    def __post_init__(self) -> None:
        expand_fields(self)
        super().__post_init__()

    def _problems(self) -> Iterator[Problem]:
        if not self.dir.strip():
            fix = "use dir = 'runs/my_run'"
            yield Problem("dir", "missing", self.dir, "must name a folder", fix)


@dataclass(frozen=True)
class TrainConfig(Checked):
    """Length of training, size of a step, loss and limits."""

    steps: int | None = field(None, between=_FROM_1)
    """length in optimizer steps (one of steps, tokens, tokens_per_parameter)"""
    tokens: int | None = field(None, between=(1, 10**16))
    """length in tokens, rounded up to whole steps"""
    tokens_per_parameter: float | None = field(None, between=(0, 10**6), positive=True)
    """length as a multiple of the number of parameters (20 is compute-optimal by Chinchilla)"""
    global_batch: int = field(16, between=_BATCH)
    """sequences per optimizer step, whatever the number of processes"""
    micro_batch: int | None = field(None, between=_BATCH)
    """sequences per forward pass, a divisor of global_batch (default: the whole share of a process, or the largest
    that costs a tenth more at most where shares are not equal)"""
    loss: str = "cross_entropy"
    """loss of logits: cross_entropy, fused_cross_entropy (inside the head, without all logits), an entry point of
    forge.losses, or module:attr, called as loss(logits, labels, weights) for the sum over a micro-batch"""
    loss_options: dict[str, Any] = field(dict)
    """further arguments of a loss of your own"""
    cross_entropy: CrossEntropyConfig = field(CrossEntropyConfig)
    """terms of the gradient next to the cross-entropy of logits"""
    fused_cross_entropy: CrossEntropyConfig = field(CrossEntropyConfig)
    """terms of the gradient next to the cross-entropy inside the head"""
    objective: str | None = None
    """step of your own in place of the loss of logits: an entry point of forge.objectives, or module:attr, called
    as objective(model, batch) for a dict of sums, of which the first is trained"""
    objective_options: dict[str, Any] = field(dict)
    """further arguments of the objective"""
    max_grad_norm: float | None = field(1.0, between=(0, math.inf), positive=True)
    """clip the global gradient norm to this; none: never"""
    stages: dict[str, StageConfig] = field(dict)
    """steps from which groups learn at other rates, by name"""

    def _problems(self) -> Iterator[Problem]:
        yield from _length_problems(self)
        # divisors are listed only for a batch in range: there may be 10**18 candidates otherwise
        if not any(range_problems(self)):
            yield from _division_problems(self)
        yield from _loss_problems(self)
        yield from _objective_problems(self)


def _length_problems(c: TrainConfig) -> Iterator[Problem]:
    lengths = [key for key in LENGTH_KEYS if getattr(c, key) is not None]
    if len(lengths) != 1:
        given = ", ".join(lengths) or "none"
        rule = f"or another length must be set, one of {', '.join(LENGTH_KEYS)}: set are {given}"
        yield Problem("steps", "one_length", ..., rule, "set train.steps = 400, for example")


def _division_problems(c: TrainConfig) -> Iterator[Problem]:
    if c.micro_batch and c.global_batch % c.micro_batch:
        rule = f"must be divisible by micro_batch {c.micro_batch}"
        fix = f"use micro_batch {_divisors(c.global_batch)}"
        yield Problem("global_batch", "divides", c.global_batch, rule, fix)


def _loss_problems(c: TrainConfig) -> Iterator[Problem]:
    default = CrossEntropyConfig()
    step = f"loss is {c.loss!r}" if c.objective is None else "objective replaces the loss"
    for name in ("cross_entropy", "fused_cross_entropy"):
        table, used = getattr(c, name), c.objective is None and c.loss == name
        rule, fix = f"is a key of loss {name!r}, and {step}", f"remove it, or use loss = {name!r}"
        for key in () if used else ("z_loss", "label_smoothing"):
            if getattr(table, key) != getattr(default, key):
                yield Problem(f"{name}.{key}", "foreign", getattr(table, key), rule, fix)


def _objective_problems(c: TrainConfig) -> Iterator[Problem]:
    if c.objective is not None and c.loss != "cross_entropy":
        rule = f"computes the loss itself, and loss is {c.loss!r}"
        yield Problem("objective", "excludes", c.objective, rule, "give one of them")
    if c.objective is None and c.objective_options:
        options = c.objective_options
        yield Problem(
            "objective_options", "requires", options, "belong to no objective", "give objective"
        )


@dataclass(frozen=True)
class CheckpointConfig(Checked):
    """Steps at which checkpoints are saved; the last step and every stop are saved in any case."""

    every_steps: int = field(100, between=_FROM_0)
    """steps between checkpoints; 0: only at the end and at a stop"""
    keep_last: int = field(3, between=_FROM_1)
    """newest checkpoints to keep; the newest verified one is never removed"""
    keep_every: int = field(0, between=_FROM_0)
    """keep the checkpoints of multiples of this step, too; 0: none"""
    best: Literal["val_loss"] | None = None
    """keep the best checkpoint by this number, of those at steps that are evaluated"""
    milestones: str | None = None
    """steps to keep, too: 'powers_of_2' (and step 0), or module:attr, called with a step"""
    wait: bool = False
    """training waits until a checkpoint is on disk; else only until it is copied"""
    staging_gib: float | None = field(None, between=(2**-30, 2**20))
    """most host memory of a rank for that copy, in GiB (default: what the state needs)"""
    max_failed_saves: int = field(3, between=(1, 1000))
    """so many saves in a row that the disk refuses in the background end the run; fewer are tried again, the first
    in the next step. A save that training waits for ends it at once"""
    digest: Literal["sha256", "blake3"] = "sha256"
    """digest of the blocks; blake3 is faster and needs forge-ckpt[fast]"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.milestones is not None:
            self.keep()

    def keep(self) -> Keep:
        """The rule by which old checkpoints are removed; ValueError for milestones that cannot be imported."""
        # imports torch's checkpoints, which a refusal need not wait for
        from forge_ckpt import Keep

        return Keep(self.keep_last, self.keep_every, self.best, milestones=self.milestones)


@dataclass(frozen=True)
class SinkConfig:
    """A sink of rows beside metrics.jsonl."""

    name: str
    """'tensorboard', 'wandb', 'mlflow', an entry point of forge.sinks, or module:attr, called as sink(directory,
    resume_step, **options)"""
    options: dict[str, Any] = field(dict)
    """further arguments of the sink. wandb: project, entity, group, tags, name, mode, id; mlflow: experiment,
    tracking_uri, run_name, tags"""


@dataclass(frozen=True)
class MetricsConfig(Checked):
    """Rows of metrics: the steps between them, and the sinks that get them."""

    every_steps: int = field(10, between=_FROM_1)
    """steps between rows in metrics.jsonl and on the console"""
    console: Literal["auto", "live", "plain", "off"] = "auto"
    """progress on a terminal; auto: live on a terminal, else plain lines"""
    tensorboard: bool = False
    """write TensorBoard files to <run.dir>/tensorboard, as a sink of that name does"""
    flat_names: bool = False
    """deprecated, removed in 0.3.0: tensorboard, wandb and mlflow get the names of metrics.jsonl, without sections"""
    gradients_every_steps: int = field(0, between=_FROM_0)
    """steps between rows with norm, signal and noise of the gradient of each block; 0: none; signal and noise need
    two micro-batches a step; without parallel.cp, pp, ep, compile and float8"""
    source_shares: bool = False
    """columns for the share of a step's labels of each source of a mixture"""
    expert_loads: bool = False
    """rows have the load of each expert over the mean, a list for each mixture (report draws it)"""
    sinks: dict[str, SinkConfig] = field(dict)
    """further places where rows go, by name"""


@dataclass(frozen=True)
class CallbackConfig(Checked):
    """A hook into the run (a forge_train.Callback)."""

    name: str
    """an entry point of forge.callbacks, or an import path 'my_lab.hooks:Mine'"""
    every_steps: int | None = field(None, between=_FROM_1)
    """steps between calls of on_step_end (default: the class attribute, 1)"""
    options: dict[str, Any] = field(dict)
    """arguments that the class is made with"""


@dataclass(frozen=True)
class SampleConfig(Checked):
    """The text that the trained model writes at the end of a run (sample.txt)."""

    prompt: str = "The "
    """text to continue"""
    max_new_tokens: int = field(200, between=(0, 10**6))
    """tokens to write; 0, or a model cut by tp, cp, pp: none"""
    temperature: float = field(0.7, between=(0, 100))
    """0 takes the most likely token; 1 samples the model's own probabilities"""


@dataclass(frozen=True)
class ResilienceConfig(Checked):
    """What a run does about faults."""

    nonfinite: NonfiniteConfig = dataclasses.field(default_factory=NonfiniteConfig)
    replicas: ReplicasConfig = dataclasses.field(default_factory=ReplicasConfig)
    alerts: AlertsConfig = dataclasses.field(default_factory=AlertsConfig)
    spike: SpikeConfig = dataclasses.field(default_factory=SpikeConfig)
    rollback: RollbackConfig = dataclasses.field(default_factory=RollbackConfig)
    watch: WatchConfig = dataclasses.field(default_factory=WatchConfig)
    save_limit_seconds: float = field(300.0, between=(0.001, 65_000))
    """longest time from a stop signal to the end of a save, in seconds: two steps, an evaluation that is due, a save that is
    under way and the last one; a batch job is told to stop so long, and a minute, before its limit"""


@dataclass(frozen=True)
class JobConfig:
    """A whole training job. Sections are the configs of the packages' components."""

    run: RunConfig
    init: InitConfig
    model: ModelSection
    lora: LoRASection
    data: DataConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    parallel: ParallelConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    metrics: MetricsConfig
    profile: ProfileConfig
    sample: SampleConfig
    resilience: ResilienceConfig
    slurm: SlurmConfig
    health: HealthConfig
    callbacks: dict[str, CallbackConfig] = dataclasses.field(default_factory=dict)

    @property
    def init_seed(self) -> int:
        """Seed of initial weights."""
        return self.run.seed if self.init.seed is None else self.init.seed

    @property
    def data_seed(self) -> int:
        """Seed of the order of data."""
        return self.run.seed if self.data.seed is None else self.data.seed


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)
