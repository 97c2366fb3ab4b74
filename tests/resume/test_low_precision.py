"""Runs whose weights and moments are stored in bf16: resumed, forked, on other layouts, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_testing import runs
from forge_testing.problems import ANY, rejects
from forge_train import JobError, Trainer, load_job, load_trained
from forge_train.hf.exporting import export_run
from forge_train.hf.importing import import_folder

pytestmark = pytest.mark.lane("test")

BF16 = {"parallel.param_dtype": "bf16", "optimizer.state_dtype": "bf16"}
QUIET = {
    "parallel.precision": "bf16",
    "metrics.console": "off",
    "sample.max_new_tokens": 0,
    "schedule.name": "constant",
}
MOE = "[model.moe]\nnum_experts = 4\nwidth_multiplier = 0.5\n"
EMA = {"optimizer.ema.decay": 0.9}
LION = {"optimizer.name": "lion", "optimizer.lr": 1e-3}


def _drop_eps(job: Path) -> Path:
    job.write_text(job.read_text().replace("\neps = 1e-4", ""))
    return job


def _fit(folder: Path, extra: str = "", **overrides: Any) -> runs.Fitted:
    job = _drop_eps(runs.make_job(folder, extra))
    flat = {key.replace("__", "."): value for key, value in overrides.items()}
    return runs.fit_alone(job, **{**QUIET, **flat})


def _assert_same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert value.dtype == two[name].dtype
        assert torch.equal(value, two[name]), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "settings"),
    [("", BF16), (MOE, {**BF16, **LION}), ("", {**BF16, **EMA})],
    ids=["adamw", "lion_moe", "ema"],
)
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(
    tmp_path: Path, extra: str, settings: dict[str, Any]
) -> None:
    straight = _fit(tmp_path / "a", extra, **settings, train__steps=6)
    _fit(tmp_path / "b", extra, **settings, train__steps=3)
    resumed = _fit(tmp_path / "b", extra, **settings, train__steps=6)
    _assert_same(straight.weights, resumed.weights)
    routers = [name for name in straight.weights if name.endswith("router.weight")]
    assert bool(routers) == (extra == MOE)
    for name, value in straight.weights.items():  # a router computes in fp32
        assert value.dtype == (torch.float32 if name in routers else torch.bfloat16), name
    model, _, _ = load_trained(tmp_path / "a/run")
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        own = straight.weights[name].float()
        assert EMA.keys() & settings.keys() or torch.equal(parameter, own)  # else the average


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("layout", [{"parallel.dp_replicate": 2}, {"parallel.tp": 2}], ids=str)
def test_a_run_on_ranks_follows_one_process_and_goes_on_there(
    tmp_path: Path, layout: dict[str, Any]
) -> None:
    settings = {**QUIET, **BF16, "train.micro_batch": 3, "train.steps": 4}
    alone = _drop_eps(runs.make_job(tmp_path / "alone"))
    one = runs.fit_reference(alone, **settings)
    job = _drop_eps(runs.make_job(tmp_path / "ranks"))
    ranks = runs.together(runs.fit_on_ranks(2, job, **settings, **layout))
    assert runs.columns(job)["loss"] == pytest.approx(runs.columns(alone)["loss"], rel=3e-3)
    for name, value in one.weights.items():
        assert ranks[name].dtype == value.dtype
    resumed = runs.fit_alone(job, **{**settings, "train.steps": 5})
    assert resumed.step == 5


@pytest.mark.slow
@pytest.mark.distributed
def test_both_ends_of_a_pipeline_round_a_tied_weight_alike(tmp_path: Path) -> None:
    job = _drop_eps(runs.make_job(tmp_path))
    tied = {"model.tie_embeddings": True, "model.num_layers": 2, "parallel.pp": 2}
    size = {"train.micro_batch": 3, "train.steps": 3}
    ends = runs.fit_on_ranks(2, job, **{**QUIET, **BF16, **EMA, **tied, **size})
    names = [{n for n in end.weights if n.startswith(("embedding", "lm_head"))} for end in ends]
    assert names[0] == names[1] != set()
    assert runs.together(ends)[min(names[0])].dtype == torch.bfloat16  # and of the same bits


@pytest.mark.lane("quick")
@pytest.mark.parametrize(
    ("key", "now"), [("optimizer.state_dtype", "fp32"), ("parallel.param_dtype", "fp32")]
)
def test_a_run_keeps_its_dtypes(tmp_path: Path, key: str, now: str) -> None:
    _fit(tmp_path, **BF16, train__steps=2)
    with rejects(key, now, "fixed", JobError):
        _fit(tmp_path, **{**BF16, key: now}, train__steps=3)


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize("before", [{}, BF16])
def test_a_fork_takes_weights_in_another_dtype_and_no_state(
    tmp_path: Path, before: dict[str, Any]
) -> None:
    parent = _fit(tmp_path / "parent", **before, train__steps=2)
    after = {} if before else BF16
    init = {"init.from": str(tmp_path / "parent/run")}
    job = _drop_eps(runs.make_job(tmp_path / "fork"))
    trainer = Trainer(
        load_job(job, {**QUIET, **after, **init, "train.steps": 1, "optimizer.lr": 1e-30})
    )
    trainer.fit()
    for name, parameter in trainer.model.named_parameters():
        plain = getattr(parameter, "full_tensor", lambda p=parameter: p)()
        assert plain.dtype == (torch.bfloat16 if after else torch.float32)
        torch.testing.assert_close(
            plain.float(), parent.weights[name].float(), rtol=2**-7 if after else 0, atol=0
        )
    keep = {"init.keep": ["weights", "optimizer"], "train.steps": 3}
    other = load_job(
        _drop_eps(runs.make_job(tmp_path / "other")), {**QUIET, **after, **init, **keep}
    )
    with rejects("optimizer.state_dtype", ANY, "changed", JobError):
        Trainer(other)


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_an_import_begins_with_its_weights_rounded(tmp_path: Path) -> None:
    parent = _fit(tmp_path / "parent", train__steps=1)
    export_run(tmp_path / "parent/run", tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "run")
    job = _drop_eps(runs.make_job(tmp_path))
    job.write_text(re.sub(r"\[model\][^\[]*", "", job.read_text()))
    began = runs.fit_alone(
        job, **{**QUIET, **BF16, "train.steps": 1, "optimizer.lr": 1e-30}
    ).weights
    for name, value in parent.weights.items():
        if "exp_avg" in name:
            continue
        assert began[name].dtype == torch.bfloat16
        torch.testing.assert_close(began[name].float(), value, rtol=2**-7, atol=0)


def test_a_rounding_that_rounds_nothing_is_rejected(tmp_path: Path) -> None:
    job = _drop_eps(runs.make_job(tmp_path))
    for name in ("schedule_free_adamw", "torch.optim:SGD"):
        with rejects("parallel.param_dtype", "bf16", "optimizer", JobError, where=repr(name)):
            load_job(job, {**QUIET, "parallel.param_dtype": "bf16", "optimizer.name": name})
    adapters = {"lora.rank": 2, "lora.patterns": ["*_proj"]}
    with rejects("parallel.param_dtype", "bf16", "adapters", JobError):
        load_job(job, {**QUIET, "parallel.param_dtype": "bf16", **adapters})
    with rejects("parallel.param_dtype", "bf16", kind=JobError, where="fp32"):
        load_job(job, {**QUIET, "parallel.param_dtype": "bf16", "parallel.precision": "fp32"})
