"""Evaluations of a run's checkpoint after training: its own sets and questions, or those of another file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import tyro

from forge_data import Batch
from forge_parallel import make_meshes, select_device
from forge_resilience import Agreement, ExitCode
from forge_train.config.layers import Layers, flatten, read_layers
from forge_train.config.resolve import resolve
from forge_train.config.schema import JobConfig
from forge_train.errors import ConfigError, config_errors
from forge_train.jobs import load_model
from forge_train.metrics.rows import finite
from forge_train.trainer.build import open_held_out
from forge_train.trainer.compute import make_compute
from forge_train.trainer.evaluation import Evaluation
from forge_train.trainer.layout import micro_batches
from forge_train.trainer.objective import find_objective
from forge_train.trainer.run_directory import RunDirectory

__all__ = ["evaluate_run", "evaluation_job", "print_evaluation"]

_OWN = ("eval.", "data.validation.")  # keys that another file may give
_REPLACED = ("eval.sets.", "eval.choices.", "eval.exact_match.")


def print_evaluation(
    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(help="folder of a run")],
    /,
    config: Annotated[
        Path | None,
        tyro.conf.arg(
            help="a TOML file with [eval] and [data.validation] alone, in place of the run's sets and questions"
        ),
    ] = None,
    step: Annotated[
        int | None, tyro.conf.arg(help="step of the checkpoint (default: the newest good one)")
    ] = None,
    rows: Annotated[int, tyro.conf.arg(help="rows that are computed at once")] = 8,
    device: Annotated[str, tyro.conf.arg(help="'auto', 'cpu' or 'cuda'")] = "auto",
    as_json: Annotated[
        bool, tyro.conf.arg(name="json", help="print one JSON object instead of a table")
    ] = False,
) -> int:
    """Evaluate a checkpoint of a run in one process, with fp32 weights: nothing is written."""
    at, found = evaluate_run(run, config, step, rows, device)
    _show(at, found, as_json)
    return ExitCode.DONE


def evaluate_run(
    run: str | Path,
    config: str | Path | None = None,
    step: int | None = None,
    rows: int = 8,
    device: str = "auto",
) -> tuple[int, dict[str, dict[str, float]]]:
    """(step, {set or questions: {measure: value}}) of a run's checkpoint; "validation" is [data.validation].

        step, found = evaluate_run("runs/mine")
        found["validation"]["bits_per_byte"]

    Measures of a set are loss (nats per label), perplexity and bits_per_byte, of questions accuracy and
    accuracy_per_byte. The weights are fp32, so numbers of a run in bf16 differ in the last digits from its own.
    Reads only. Raises ConfigError, DataError or StateError.
    """
    if rows < 1:
        raise ConfigError([f"--rows {rows} must be 1 or more; use 8"])
    paths = RunDirectory(run)
    with config_errors():
        where = select_device(device)
    model, _, at = load_model(run, where, step)
    job = evaluation_job(paths, None if config is None else Path(config), rows)
    meshes = make_meshes(job.parallel, where)
    layout, agreement = job.parallel.axes(1), Agreement(meshes.host_group)
    evaluation = Evaluation(job, open_held_out(job, model, layout))
    if not evaluation.names:
        raise ConfigError(
            [f"{run} has nothing to evaluate; name a file with [eval.sets] by --config"]
        )
    division = micro_batches(job, layout)
    compute = make_compute(model, job, meshes, division, find_objective(job.train))
    return at, {
        name: evaluation.measure(name, compute, _count, agreement) for name in evaluation.names
    }


def _count(batch: Batch) -> float:
    return batch.label_weight


def evaluation_job(paths: RunDirectory, other: Path | None, rows: int) -> JobConfig:
    """The run's job in one process, `rows` at once, with the evaluations of another file in place of its own."""
    given = None if other is None else read_layers(other)
    layers = Layers()
    for key, value in flatten(read_layers(paths.config).values):
        if key.startswith("parallel.") or (given is not None and key.startswith(_REPLACED)):
            continue
        layers.set(key, value, str(paths.config))
    keys = {} if given is None else dict(flatten(given.values))
    strange = [key for key in keys if not key.startswith(_OWN)]
    if strange:
        raise ConfigError(
            [
                f"{strange[0]} in {other} is no key of an evaluation; give [eval] and [data.validation] alone"
            ]
        )
    if any(key.startswith("data.validation.") for key in keys):
        layers.values.get("data", {}).pop("validation", None)
    here = {
        "run.dir": str(paths.path),
        "train.global_batch": rows,
        "train.micro_batch": rows,
        "parallel.precision": "fp32",
        "eval.every_steps": 1,
    }
    for key, value in {**keys, **here}.items():
        layers.set(key, value, str(other) if key in keys else "forge-train eval")
    # the run's file holds what it derived: without validation it had none
    return resolve(layers, derives_validation=False).config


def _show(at: int, found: dict[str, dict[str, float]], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"step": at, **{name: finite(m) for name, m in found.items()}}))
        return
    print(f"step {at}")
    for name, measures in found.items():
        values = "  ".join(f"{measure} {value:.6g}" for measure, value in measures.items())
        print(f"{name:20} {values}")
