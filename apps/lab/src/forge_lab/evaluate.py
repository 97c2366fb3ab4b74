"""`forge-train eval`: evaluations of a run's checkpoint, by its own sets and questions or by another file's."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from forge_data import Batch
from forge_lab._renamed import renamed_argument
from forge_lab._shared.paths import user_path
from forge_lab._shared.problems import invalid
from forge_lab._shared.toml_files import flatten
from forge_parallel import Meshes, ParallelConfig, World, find_world, select_device
from forge_parallel.metric_rows import finite
from forge_resilience import Agreement, ExitCode
from forge_train import JobConfig, Layers, RunDirectory, load_model, read_layers, resolve
from forge_train.errors import ConfigError, config_errors, run_on_all_ranks
from forge_train.toolkit import (
    Evaluation,
    begin_texts_as,
    init_ranks,
    job_compute,
    open_held_out,
    require_layout,
)

_OWN = ("eval.", "data.validation.")  # keys that another file may give
_REPLACED = ("eval.sets.", "eval.choices.", "eval.exact_match.")
_HELP = {axis.name: axis.metadata["help"] for axis in fields(ParallelConfig)}


@dataclass(frozen=True)
class Axes:
    """The flags `--parallel.AXIS N`: the layout of this verb, whatever the run was trained on.

    Ranks that no axis takes are data ranks.
    """

    dp_replicate: Annotated[int, tyro.conf.arg(help=_HELP["dp_replicate"])] = 1
    tp: Annotated[int, tyro.conf.arg(help=_HELP["tp"])] = 1
    sequence_parallel: Annotated[
        Literal["true", "false"], tyro.conf.arg(help=_HELP["sequence_parallel"])
    ] = "true"
    cp: Annotated[int, tyro.conf.arg(help=_HELP["cp"])] = 1
    pp: Annotated[int, tyro.conf.arg(help=_HELP["pp"])] = 1
    ep: Annotated[int, tyro.conf.arg(help=_HELP["ep"])] = 1

    def parallel(self, device: str) -> ParallelConfig:
        """The layout, in fp32. ConfigError for a value out of range."""
        axes: dict[str, Any] = asdict(self)
        axes |= {"sequence_parallel": self.sequence_parallel == "true", "device": device}
        with config_errors("parallel"):
            return ParallelConfig(precision="fp32", **axes)


@dataclass(frozen=True)
class EvalFlags:
    """The arguments of `forge-train eval`."""

    run: tyro.conf.Positional[Path]
    """folder of a run"""
    config: Path | None = None
    """a TOML file with only [eval] and [data.validation], in place of the run's sets and questions"""
    step: int | None = None
    """step of the checkpoint; without it the newest good one"""
    batch_size: int = 8
    """sequences that a data rank computes at once"""
    device: str = "auto"
    """'auto', 'cpu' or 'cuda'"""
    json: bool = False
    """print one JSON object instead of a table"""
    parallel: Axes = field(default_factory=Axes)
    nproc: int | None = None
    """processes on this machine that divide the work; without it one, or those of a launcher"""

    def check(self, nproc: int) -> None:
        """Raise ConfigError for what keeps `nproc` processes from it, before any of them starts."""
        layout = self.parallel.parallel(self.device)
        world = World(world_size=nproc, local_world_size=nproc)
        checked_job(self.run, self.config, self.batch_size, layout, world)


def print_evaluation(flags: EvalFlags) -> int:
    """Evaluate a checkpoint of a run with fp32 weights, in one process or as one rank of many; write nothing."""
    parallel = flags.parallel.parallel(flags.device)
    at, found = evaluate_run(
        flags.run, flags.config, flags.step, flags.batch_size, parallel=parallel
    )
    if find_world().rank:
        return ExitCode.DONE

    if flags.json:
        print(json.dumps({"step": at, **{name: finite(m) for name, m in found.items()}}))
        return ExitCode.DONE
    print(f"step {at}")
    for name, measures in found.items():
        values = "  ".join(f"{measure} {value:.6g}" for measure, value in measures.items())
        print(f"{name:20} {values}")
    return ExitCode.DONE


@renamed_argument("rows", "batch_size")
def evaluate_run(
    run: str | Path,
    config: str | Path | None = None,
    step: int | None = None,
    batch_size: int = 8,
    device: str = "auto",
    parallel: ParallelConfig | None = None,
    meshes: Meshes | None = None,
) -> tuple[int, dict[str, dict[str, float]]]:
    """Evaluate a run's checkpoint: (step, {set or questions: {measure: value}}); "validation" is [data.validation].

        step, found = evaluate_run("runs/mine")
        found["validation"]["bits_per_byte"]

    Measures of a set are loss (nats per label), perplexity and bits_per_byte, of questions accuracy and
    accuracy_per_byte. The weights are fp32, so numbers of a run in bf16 differ in the last digits from its own.
    Under torchrun, srun or RANK/WORLD_SIZE each rank calls it and gets the numbers; `parallel` is their layout, by
    default data ranks. `meshes` are the meshes of `parallel` where a group runs already.
    Reads only. Raises ConfigError, DataError or StateError; for the layout before the ranks meet.
    """
    world = world_of(meshes)
    if parallel is None:
        parallel = Axes().parallel(device)
    job = checked_job(run, config, batch_size, parallel, world)
    with init_ranks(parallel) if meshes is None else nullcontext(meshes) as ranks:
        return _measure(run, step, job, ranks)


def world_of(meshes: Meshes | None) -> World:
    """The ranks of a group that runs already, or of the launcher. ConfigError for a bad environment."""
    if meshes is not None:
        return World(world_size=meshes.world_size, local_world_size=meshes.world_size)
    with config_errors():
        return find_world()


def checked_job(
    run: str | Path,
    config: str | Path | None,
    batch_size: int,
    parallel: ParallelConfig,
    world: World,
) -> JobConfig:
    """The job of an evaluation on these ranks. ConfigError for a run, a file or a layout that does not fit."""
    if batch_size < 1:
        rule, fix = "must be 1 or more", "use 8"
        raise invalid("--batch_size", "range", batch_size, rule, fix, kind=ConfigError)

    paths, other = RunDirectory(run), None if config is None else user_path(config)
    paths.require_run()
    with config_errors("parallel"):
        select_device(parallel.device)
        parallel.axes(world.world_size, world.local_world_size)
    job = evaluation_job(paths, other, batch_size, parallel, world.world_size)
    require_layout(job, world.world_size, world.local_world_size)
    return job


def _measure(
    run: str | Path, step: int | None, job: JobConfig, meshes: Meshes
) -> tuple[int, dict[str, dict[str, float]]]:
    model, _, at = load_model(run, meshes.device, step, parallel=job.parallel, meshes=meshes)
    agreement = Agreement(meshes.host_group, alone=meshes.world_size == 1)
    layout = job.parallel.axes(meshes.world_size)
    evaluation = run_on_all_ranks(
        agreement, lambda: Evaluation(job, open_held_out(job, model, layout))
    )
    if not evaluation.names:
        rule, fix = "has nothing to evaluate", "name a file with [eval.sets] by --config"
        raise invalid("run", "nothing", str(run), rule, fix, kind=ConfigError)

    compute = job_compute(model, job, meshes)

    def count(batch: Batch) -> float:
        return batch.label_weight if meshes.is_batch_leader else 0.0

    names = evaluation.names
    return at, {name: evaluation.measure(name, compute, count, agreement) for name in names}


def evaluation_job(
    paths: RunDirectory,
    other: Path | None,
    batch_size: int,
    parallel: ParallelConfig | None = None,
    world_size: int = 1,
) -> JobConfig:
    """The run's job on these ranks in fp32, with the evaluations of another file in place of its own.

    Each data rank computes `batch_size` sequences at once.
    """
    parallel = parallel or ParallelConfig(precision="fp32")
    given = None if other is None else read_layers(other)
    layers, run = Layers(), read_layers(paths.config)
    for key, value in flatten(run.values):
        if key.startswith("parallel.") or (given is not None and key.startswith(_REPLACED)):
            continue
        layers.set(key, value, str(paths.config))

    keys = {} if given is None else dict(flatten(given.values))
    unknown = [key for key in keys if not key.startswith(_OWN)]
    if unknown:
        rule, fix = "is not a key of an evaluation", "give only [eval] and [data.validation]"
        raise invalid(unknown[0], "unknown_key", ..., rule, fix, where=other, kind=ConfigError)
    if any(key.startswith("data.validation.") for key in keys):
        layers.values.get("data", {}).pop("validation", None)

    here: dict[str, Any] = {
        "run.dir": str(paths.path),
        # a pipeline takes at least as many micro-batches as it has stages
        "train.global_batch": batch_size * parallel.axes(world_size).batch_size * parallel.pp,
        "train.micro_batch": batch_size,
        "eval.every_steps": 1,
    }
    usual = ParallelConfig()
    for item in fields(parallel):
        value = getattr(parallel, item.name)
        if value != getattr(usual, item.name):
            here[f"parallel.{item.name}"] = value

    for key, value in {**keys, **here}.items():
        layers.set(key, value, str(other) if key in keys else "forge-train eval")
    begin_texts_as(run, layers)
    # the run's file holds what it derived: without validation it had none
    return resolve(layers, derives_validation=False).config
