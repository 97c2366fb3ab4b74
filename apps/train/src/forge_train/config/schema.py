"""The typed, validated description of a whole job; every section is the config of one component."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from forge_core import OptimizerConfig, ScheduleConfig, TransformerConfig
from forge_core.loss import CrossEntropyConfig
from forge_core.optim import StageConfig
from forge_core.registry import installed
from forge_data import DataConfig
from forge_parallel import ParallelConfig
from forge_resilience.alerts import AlertsConfig
from forge_resilience.health import HealthConfig
from forge_resilience.policy import NonfiniteConfig, RollbackConfig, SpikeConfig
from forge_resilience.replicas import ReplicasConfig
from forge_resilience.slurm import SlurmConfig
from forge_resilience.supervise import WatchConfig
from forge_train._shared.paths import expand_fields
from forge_train._shared.problems import Problem, raise_problems
from forge_train.config.evaluation import EvalConfig
from forge_train.config.experts import MoESection
from forge_train.config.init import InitConfig
from forge_train.config.layers import LENGTH_KEYS
from forge_train.config.lora import LoRASection
from forge_train.config.profile import ProfileConfig
from forge_train.config.ranges import range_problems

if TYPE_CHECKING:
    from forge_ckpt import Keep


def _field(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


MODELS_GROUP = "forge.models"
_MAX_STEPS = 10**9
_MAX_TOKENS = 10**16
_MAX_BATCH = 2**20


@dataclass(frozen=True)
class RunConfig:
    """The folder of a run and its seed."""

    dir: str = field(
        default="runs/default",
        metadata={
            "help": "folder of this run: config, metrics, events, checkpoints",
            "path": True,
        },
    )
    seed: int = _field(
        0, "seed of random numbers, and of what has no seed of its own: init.seed, data.seed"
    )

    def __post_init__(self) -> None:
        expand_fields(self)
        raise_problems("", self._problems())

    def _problems(self) -> Iterator[Problem]:
        yield from range_problems(self, 0, 2**63 - 1, "seed")
        if not self.dir.strip():
            fix = "use dir = 'runs/my_run'"
            yield Problem("dir", "missing", self.dir, "must name a folder", fix)


@dataclass(frozen=True)
class BuiltInModelConfig(TransformerConfig):
    """The built-in transformer, dense or with mixtures of experts, as the [model] table of a job."""

    name: str = _field(
        "transformer",
        "'transformer', 'vlm' (with images), an entry point of forge.models, or an import path 'my_lab.model:build'",
    )
    moe: MoESection = field(
        default_factory=MoESection, metadata={"help": "which feed-forwards are mixtures of experts"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        raise_problems("", _mixture_problems(self))

    @property
    def is_built_in(self) -> bool:
        """True: its initial values are a function of the seed, and a user's parts in it declare theirs."""
        return True

    @property
    def moe_layers(self) -> list[int]:
        """Layers whose feed-forward is a mixture."""
        return [i for i in range(self.num_layers) if self.moe.is_mixture(i)]


def _mixture_problems(c: BuiltInModelConfig) -> Iterator[Problem]:
    num_experts = c.moe.num_experts
    if not num_experts:
        return
    if not c.moe_layers:
        rule = f"needs a layer: first_dense_layers {c.moe.first_dense_layers} leaves none of {c.num_layers}"
        yield Problem("moe.num_experts", "layers", num_experts, rule, "lower first_dense_layers")
    if c.mtp.num_modules:
        rule = f"must be 0 with moe.num_experts {num_experts}: its blocks are dense"
        yield Problem("mtp.num_modules", "excludes", c.mtp.num_modules, rule, "leave one out")
    if c.parametrization == "mup":
        rule = "has no rule in parametrization 'mup', which has rules for dense layers"
        fix = "use 0, or parametrization 'standard'"
        yield Problem("moe.num_experts", "mup", num_experts, rule, fix)


@dataclass(frozen=True)
class ImportedModelConfig:
    """A model from outside: `build(**args)` returns a module, which is called as
    `model(tokens, positions, document_ids)` on (B, S) integers and returns logits (B, S, V)."""

    name: str = _field("", "import path 'package.module:function' of the model's builder")
    vocab_size: int = _field(0, "number of token ids the model accepts (default: that of the data)")
    args: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "keyword arguments of the builder"}
    )

    @property
    def is_built_in(self) -> bool:
        """False: without a table of its own its initial values are those of the builder."""
        return False

    def __post_init__(self) -> None:
        module, _, attr = self.name.partition(":")
        path = all(part.isidentifier() for part in [*module.split("."), attr])
        problems = list(range_problems(self, 0, 2**31 - 1, "vocab_size"))
        if not path and not installed(self.name, MODELS_GROUP):
            fix = f"use 'transformer', 'vlm', an entry point of {MODELS_GROUP} or 'package.module:attr'"
            problems.insert(0, Problem("name", "unknown", self.name, "is not a model", fix))
        raise_problems("", problems)


@dataclass(frozen=True)
class TrainConfig:
    """Length of training, size of a step, loss and limits."""

    steps: int | None = _field(None, "length in optimizer steps (one of steps, tokens, "
                                     "tokens_per_parameter)")  # fmt: skip
    tokens: int | None = _field(None, "length in tokens, rounded up to whole steps")
    tokens_per_parameter: float | None = _field(
        None,
        "length as a multiple of the number of parameters (20 is compute-optimal by Chinchilla)",
    )
    global_batch: int = _field(16, "sequences per optimizer step, whatever the number of processes")
    micro_batch: int | None = _field(
        None,
        "sequences per forward pass, a divisor of global_batch (default: the whole share of a process, or the "
        "largest that costs a tenth more at most where shares are not equal)",
    )
    loss: str = _field(
        "cross_entropy",
        "loss of logits: cross_entropy, fused_cross_entropy (inside the head, without all logits), an entry point "
        "of forge.losses, or module:attr, called as loss(logits, labels, weights) for the sum over a micro-batch",
    )
    loss_options: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "further arguments of a loss of your own"}
    )
    cross_entropy: CrossEntropyConfig = field(
        default_factory=CrossEntropyConfig,
        metadata={"help": "terms of the gradient beside the cross-entropy of logits"},
    )
    fused_cross_entropy: CrossEntropyConfig = field(
        default_factory=CrossEntropyConfig,
        metadata={"help": "terms of the gradient beside the cross-entropy inside the head"},
    )
    objective: str | None = _field(
        None,
        "step of your own in place of the loss of logits: an entry point of forge.objectives, or module:attr, "
        "called as objective(model, batch) for a dict of sums, of which the first is trained",
    )
    objective_options: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "further arguments of the objective"}
    )
    max_grad_norm: float | None = _field(1.0, "clip the global gradient norm to this; none: never")
    stages: dict[str, StageConfig] = field(
        default_factory=dict,
        metadata={"help": "steps from which groups learn at other rates, by name"},
    )

    def __post_init__(self) -> None:
        outside = [
            *range_problems(self, 1, _MAX_STEPS, "steps"),
            *range_problems(self, 1, _MAX_TOKENS, "tokens"),
            *range_problems(self, 1, _MAX_BATCH, "global_batch", "micro_batch"),
        ]
        # divisors are listed only for a batch in range: there may be 10**18 candidates otherwise
        division = [] if outside else _division_problems(self)
        objective, clip = _objective_problems(self), _clip_problems(self)
        loss, length = _loss_problems(self), _length_problems(self)
        raise_problems("", [*outside, *length, *division, *loss, *objective, *clip])


def _length_problems(c: TrainConfig) -> Iterator[Problem]:
    lengths = [key for key in LENGTH_KEYS if getattr(c, key) is not None]
    if len(lengths) != 1:
        given = ", ".join(lengths) or "none"
        rule = f"or another length must be set, one of {', '.join(LENGTH_KEYS)}: set are {given}"
        yield Problem("steps", "one_length", ..., rule, "set train.steps = 400, for example")
    if c.tokens_per_parameter is not None and not 0 < c.tokens_per_parameter <= 10**6:
        rule = "must be above 0 and at most 10**6"
        yield Problem("tokens_per_parameter", "range", c.tokens_per_parameter, rule, "use 20.0")


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


def _clip_problems(c: TrainConfig) -> Iterator[Problem]:
    if c.max_grad_norm is not None and not c.max_grad_norm > 0:
        yield Problem(
            "max_grad_norm", "range", c.max_grad_norm, "must be above 0", "use 1.0 or none"
        )


@dataclass(frozen=True)
class CheckpointConfig:
    """Steps at which checkpoints are saved; the last step and every stop are saved in any case."""

    every_steps: int = _field(100, "steps between checkpoints; 0: only at the end and at a stop")
    keep_last: int = _field(
        3, "newest checkpoints to keep; the newest verified one is never removed"
    )
    keep_every: int = _field(0, "keep the checkpoints of multiples of this step, too; 0: none")
    best: Literal["val_loss"] | None = _field(
        None, "keep the best checkpoint by this number, of those at steps that are evaluated"
    )
    milestones: str | None = _field(
        None, "steps to keep, too: 'powers_of_2' (and step 0), or module:attr, called with a step"
    )
    wait: bool = _field(
        False, "training waits until a checkpoint is on disk; else only until it is copied"
    )
    staging_gib: float | None = _field(
        None, "most host memory of a rank for that copy, in GiB (default: what the state needs)"
    )
    max_failed_saves: int = _field(
        3, "so many saves in a row that the disk refuses end the run; fewer are tried again"
    )
    digest: Literal["sha256", "blake3"] = _field(
        "sha256", "digest of the blocks; blake3 is faster and needs forge-ckpt[fast]"
    )

    def __post_init__(self) -> None:
        raise_problems("", self._problems())
        if self.milestones is not None:
            self.keep()

    def _problems(self) -> Iterator[Problem]:
        yield from range_problems(self, 0, _MAX_STEPS, "every_steps", "keep_every")
        yield from range_problems(self, 1, _MAX_STEPS, "keep_last")
        yield from range_problems(self, 1, 1000, "max_failed_saves")
        yield from range_problems(self, 2**-30, 2**20, "staging_gib")

    def keep(self) -> Keep:
        """The rule by which old checkpoints are removed; ValueError for milestones that cannot be imported."""
        from forge_ckpt import (
            Keep,  # imports torch's checkpoints, which a refusal need not wait for
        )

        return Keep(self.keep_last, self.keep_every, self.best, milestones=self.milestones)


@dataclass(frozen=True)
class SinkConfig:
    """A sink of rows beside metrics.jsonl."""

    name: str = field(
        metadata={
            "help": "'tensorboard', 'wandb', 'mlflow', an entry point of forge.sinks, or module:attr, called as "
            "sink(directory, resume_step, **options)"
        }
    )
    options: dict[str, Any] = field(
        default_factory=dict,
        metadata={
            "help": "further arguments of the sink. wandb: project, entity, group, tags, name, mode, id; "
            "mlflow: experiment, tracking_uri, run_name, tags"
        },
    )


@dataclass(frozen=True)
class MetricsConfig:
    """Rows of metrics: the steps between them, and the sinks that get them."""

    every_steps: int = _field(10, "steps between rows in metrics.jsonl and on the console")
    console: Literal["auto", "live", "plain", "off"] = _field(
        "auto", "progress on a terminal; auto: live on a terminal, else plain lines"
    )
    tensorboard: bool = _field(
        False, "write TensorBoard files to <run.dir>/tensorboard, as a sink of that name does"
    )
    gradients_every_steps: int = _field(
        0,
        "steps between rows with norm, signal and noise of the gradient of each block; 0: none; signal and "
        "noise need two micro-batches a step; without parallel.cp, pp, ep, compile and float8",
    )
    source_shares: bool = _field(
        False, "columns for the share of a step's labels of each source of a mixture"
    )
    expert_loads: bool = _field(
        False,
        "rows have the load of each expert over the mean, a list for each mixture (report draws it)",
    )
    sinks: dict[str, SinkConfig] = field(
        default_factory=dict, metadata={"help": "further places where rows go, by name"}
    )

    def __post_init__(self) -> None:
        rows = range_problems(self, 1, _MAX_STEPS, "every_steps")
        gradients = range_problems(self, 0, _MAX_STEPS, "gradients_every_steps")
        raise_problems("", [*rows, *gradients])


@dataclass(frozen=True)
class CallbackConfig:
    """A hook into the run (a forge_train.Callback)."""

    name: str = field(
        metadata={
            "help": "an entry point of forge.callbacks, or an import path 'my_lab.hooks:Mine'"
        }
    )
    every_steps: int | None = _field(
        None, "steps between calls of on_step_end (default: the class attribute, 1)"
    )
    options: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "arguments that the class is made with"}
    )

    def __post_init__(self) -> None:
        raise_problems("", range_problems(self, 1, _MAX_STEPS, "every_steps"))


@dataclass(frozen=True)
class SampleConfig:
    """The text that the trained model writes at the end of a run (sample.txt)."""

    prompt: str = _field("The ", "text to continue")
    max_new_tokens: int = _field(200, "tokens to write; 0, or a model cut by tp, cp, pp: none")
    temperature: float = _field(
        0.7, "0 takes the most likely token; 1 samples the model's own probabilities"
    )

    def __post_init__(self) -> None:
        length = range_problems(self, 0, 10**6, "max_new_tokens")
        raise_problems("", [*length, *range_problems(self, 0, 100, "temperature")])


@dataclass(frozen=True)
class ResilienceConfig:
    """What a run does about faults."""

    nonfinite: NonfiniteConfig = field(default_factory=NonfiniteConfig)
    replicas: ReplicasConfig = field(default_factory=ReplicasConfig)
    alerts: AlertsConfig = field(default_factory=AlertsConfig)
    spike: SpikeConfig = field(default_factory=SpikeConfig)
    rollback: RollbackConfig = field(default_factory=RollbackConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    save_limit_seconds: float = _field(
        300.0,
        "longest time that a save may take: a batch job is told to stop so long, and a minute, before its limit",
    )

    def __post_init__(self) -> None:
        raise_problems("", range_problems(self, 0.001, 65_000, "save_limit_seconds"))


ModelSection = BuiltInModelConfig | ImportedModelConfig


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
    callbacks: dict[str, CallbackConfig] = field(default_factory=dict)

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
