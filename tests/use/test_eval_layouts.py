"""A checkpoint opened and evaluated in layouts: the weights and numbers of one process, whatever the run was trained in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_lab.cli import evaluate
from forge_lab.evaluate import evaluate_run
from forge_parallel import ParallelConfig, make_meshes
from forge_testing import run_on_ranks
from forge_testing.evaluations import asked, rows_of
from forge_testing.problems import rejects
from forge_testing.runs import Fitted, fit_alone, make_job, together
from forge_train import ConfigError, JobError
from forge_train.jobs import load_model

pytestmark = [pytest.mark.distributed, pytest.mark.lane("test")]

MIXTURE = {
    "model.moe.num_experts": 4,
    "model.moe.top_k": 2,
    "parallel.param_dtype": "bf16",
    "parallel.precision": "bf16",
}
ADAPTERS = {"lora.rank": 2, "lora.alpha": 30.0, "optimizer.lr": 0.1}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp_shard": (2, {}),
    "dp_replicate": (3, {"dp_replicate": 3}),
    "tp": (2, {"tp": 2}),
    "tp-whole-sequences": (2, {"tp": 2, "sequence_parallel": False}),
    "cp": (2, {"cp": 2}),
    "pp": (2, {"pp": 2}),
    "ep": (2, {"ep": 2}),
    "dp-tp": (4, {"tp": 2}),
}


def trained(folder: Path, **own: Any) -> Path:
    job = make_job(folder)
    steps = {"train.steps": 3, "checkpoint.every_steps": 3}
    fit_alone(job, **{**asked(folder), **steps, **own})
    return job.parent / "run"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose checkpoint holds experts, in bf16."""
    return trained(tmp_path_factory.mktemp("mixture"), **MIXTURE)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose checkpoint holds adapters beside the frozen weights of another run."""
    folder = tmp_path_factory.mktemp("adapted")
    trunk = trained(folder / "trunk")
    return trained(folder / "run", **ADAPTERS, **{"init.from": str(trunk)})


def opened(run: Path, options: dict[str, Any], step: int | None = None) -> Fitted:
    parallel = ParallelConfig(device="cpu", precision="fp32", **options)
    try:
        model, _, at = load_model(run, step=step, parallel=parallel, meshes=make_meshes(parallel))
    except JobError as error:
        return Fitted(int(error.exit_code), 0, tuple(error.lines), {})
    assert not model.training
    named = model.named_parameters()
    whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in named}
    return Fitted(0, at, (), {n: p.detach() for n, p in whole.items()})


def measured(run: Path, options: dict[str, Any]) -> Any:
    parallel = ParallelConfig(device="cpu", precision="fp32", **options)
    meshes = make_meshes(parallel)
    return evaluate_run(run, batch_size=3, parallel=parallel, meshes=meshes)


SLOW = [pytest.mark.slow, pytest.mark.lane("ci")]


@pytest.mark.lane("quick")
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=SLOW if at % 2 else []) for at, name in enumerate(LAYOUTS)]
)
def test_every_layout_reads_the_same_bits(mixture: Path, layout: str) -> None:
    world, options = LAYOUTS[layout]
    found = together(run_on_ranks(world, opened, mixture, options))
    wanted = dict(load_model(mixture)[0].named_parameters())
    assert found.keys() == wanted.keys()
    assert all(p.dtype == torch.float32 for p in found.values())
    assert all(torch.equal(found[n], wanted[n]) for n in wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *(("mixture", layout) for layout in LAYOUTS),
        *(("adapted", layout) for layout in ("dp_shard", "tp", "pp")),
    ],
)
def test_every_layout_measures_what_one_process_does(
    request: pytest.FixtureRequest, kind: str, layout: str
) -> None:
    run, (world, options) = request.getfixturevalue(kind), LAYOUTS[layout]
    step, wanted = evaluate_run(run, batch_size=3)
    assert wanted.keys() == {"validation", "seen", "held", "code"}
    if kind == "adapted":  # in fp32, as it was trained
        row = rows_of(run.parent / "job.toml")[step]
        assert wanted["held"]["loss"] == pytest.approx(row["eval/held/loss"], rel=1e-5)
    for at, found in run_on_ranks(world, measured, run, options):  # on every rank
        assert (at, found.keys()) == (step, wanted.keys())
        for name, measures in wanted.items():
            assert found[name] == pytest.approx(measures, rel=1e-5), name


@pytest.mark.lane("quick")
def test_a_checkpoint_that_cannot_be_opened_is_rejected_by_all_ranks_alike(mixture: Path) -> None:
    found = run_on_ranks(2, opened, mixture, {}, 5)
    assert [f.code for f in found] == [66, 66]
    assert found[0].problems == found[1].problems
    assert found[0].problems[0].startswith("step 5 ")
    assert "[3]" in found[0].problems[0]


@pytest.mark.slow
def test_the_command_starts_ranks_and_one_of_them_prints(mixture: Path) -> None:
    command = [sys.executable, "-m", "forge_train", "eval", str(mixture), "--nproc", "2", "--batch_size", "3"]  # fmt: skip
    command += ["--parallel.tp", "2", "--parallel.sequence_parallel", "false", "--json"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    got, (step, wanted) = json.loads(found.stdout), evaluate_run(mixture, batch_size=3)
    assert got.pop("step") == step
    for name, measures in wanted.items():
        assert got[name] == pytest.approx(measures, rel=1e-5), name


@pytest.mark.parametrize(
    ("flags", "key", "value", "code"),
    [
        (("--parallel.tp", "4"), "parallel.dp_shard", -1, "divides"),
        (("--parallel.tp", "0"), "parallel.tp", 0, "range"),
        (("--parallel.ep", "2", "--parallel.pp", "2"), "parallel.ep", 2, "divides"),
    ],
)
def test_a_layout_that_does_not_fit_is_rejected_before_a_rank_starts(
    mixture: Path, flags: tuple[str, ...], key: str, value: int, code: str
) -> None:
    shown = " ".join(flags[:2]).removeprefix("--parallel.")
    with rejects(key, value, code, ConfigError, where=shown):
        evaluate([str(mixture), "--nproc", "2", *flags])


def test_a_key_that_is_no_axis_names_the_nearest(mixture: Path) -> None:
    with rejects("--parallel.tpp", ..., "flag", ConfigError, where="--parallel.tp INT"):
        evaluate([str(mixture), "--nproc", "2", "--parallel.tpp", "2"])
