"""Statistics that [metrics] switches on: gradients of blocks, loads of experts, shares of sources; off by default."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from forge_testing.problems import rejects
from forge_testing.runs import fit_alone, fit_on_ranks, fit_reference, make_job, together
from forge_train import Callback, ConfigError, Trainer, load_job, read_run
from forge_train.metrics.columns import column_of

MOE = "\n[model.moe]\nnum_experts = 4\ntop_k = 2\nz_loss_weight = 1e-3\n"
KEYS: dict[str, Any] = {
    "model.num_layers": 2,
    "train.micro_batch": 3,
    "train.steps": 4,
    "metrics.gradients_every_steps": 2,
    "sample.max_new_tokens": 0,
    "checkpoint.every_steps": 0,
}


def metrics(folder: Path) -> dict[str, list[Any]]:
    return read_run(folder / "run").metrics


def gradients(found: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Columns of gradients, in the rows that have them."""
    return {k: v[1::2] for k, v in found.items() if k.startswith("gradient.")}


def test_columns_are_in_their_rows_and_norms_make_up_that_of_all(tmp_path: Path) -> None:
    fit_reference(make_job(tmp_path), **KEYS)
    found = metrics(tmp_path)
    own = gradients(found)
    measures = ("norm", "signal", "snr", "noise_scale")
    assert list(own) == [f"gradient.{part}.{m}" for part in ("0", "1", "rest") for m in measures]
    assert all(column_of(name) for name in found)
    assert all(found[name][::2] == [None, None] for name in own)
    for number, norm in enumerate(found["grad_norm"][1::2]):
        parts = [own[f"gradient.{part}.norm"][number] for part in ("0", "1", "rest")]
        assert math.hypot(*parts) == pytest.approx(norm, rel=1e-5)


def test_they_change_no_bit_of_training_and_are_off_by_default(tmp_path: Path) -> None:
    off = {**KEYS, "metrics.gradients_every_steps": 0}
    with_them = fit_reference(make_job(tmp_path / "on"), **KEYS)
    without = fit_alone(make_job(tmp_path / "off"), **off)
    for name, value in without.weights.items():
        assert torch.equal(with_them.weights[name], value), name
    assert not gradients(metrics(tmp_path / "off"))


def test_a_step_that_is_due_has_a_row_of_its_own(tmp_path: Path) -> None:
    keys = {"metrics.every_steps": 3, "metrics.gradients_every_steps": 2, "eval.every_steps": 0}
    fit_alone(make_job(tmp_path), **{**KEYS, **keys, "train.steps": 5})
    assert metrics(tmp_path)["step"] == [2, 3, 4, 5]


def test_loads_of_experts_and_shares_of_sources(tmp_path: Path) -> None:
    more = '\n[data.sources.more]\nname = "builtin"\nweight = 3.0\n'
    keys = {"metrics.expert_loads": True, "metrics.source_shares": True}
    keys |= {"data.sources.text.weight": 1.0}
    fit_alone(make_job(tmp_path, MOE + more), **{**KEYS, **keys})
    found = metrics(tmp_path)
    for layer in "01":
        for loads, fullest in zip(found[f"moe.{layer}.load"], found[f"moe.{layer}.max_load"]):
            assert sum(loads) == pytest.approx(4, abs=1e-3)
            assert max(loads) == pytest.approx(fullest, abs=1e-3)
    shares = list(zip(found["share.source.text"], found["share.source.more"]))
    assert all(text + more == pytest.approx(1, rel=1e-5) for text, more in shares)
    assert sum(more for _, more in shares) > sum(text for text, _ in shares)
    assert all(column_of(name) for name in found)


@pytest.mark.lane("test")
@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"parallel.compile": True}, "parallel.compile true"),
        (
            {"parallel.float8": "rowwise", "parallel.precision": "bf16"},
            "parallel.float8 'rowwise'",
        ),
    ],
)
def test_a_job_without_gradients_of_micro_batches_is_rejected(
    tmp_path: Path, keys: dict[str, Any], named: str
) -> None:
    with rejects("metrics.gradients_every_steps", 2, "layout", ConfigError, where=named):
        Trainer(load_job(make_job(tmp_path), {**KEYS, **keys}))


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.distributed
def test_ranks_without_gradients_of_micro_batches_are_rejected(tmp_path: Path) -> None:
    keys = {key.replace(".", "__"): value for key, value in KEYS.items()}
    cases = {
        "pp 2": ("", "pp"),
        "cp 2": ("", "cp"),
        "ep 2": (MOE, "ep"),
        "parallel.tp 2": (MOE, "tp"),
    }
    for number, (named, (extra, axis)) in enumerate(cases.items()):
        job = make_job(tmp_path / str(number), extra)
        for rank in fit_on_ranks(2, job, **keys, **{f"parallel__{axis}": 2}):
            assert rank.code == 78
            assert any(named in p and "gradients_every_steps 2" in p for p in rank.problems)


class NoBlockingReceive(Callback):
    """In steps 2 and 3, behind torch's warm-up of a pipeline and before a save, nothing receives and waits for one rank."""

    before: dict[str, Any] = {}  # noqa: RUF012

    def on_step_end(self, trainer: Trainer) -> None:
        def refuse(*args: Any, **kwargs: Any) -> None:
            raise AssertionError("a receive that waits")

        if trainer.progress.step == 1:
            self.before = {n: getattr(dist, n) for n in ("recv", "recv_object_list", "broadcast")}
            for name in self.before:
                setattr(dist, name, refuse)

        if trainer.progress.step == 3:
            for name, function in self.before.items():
                setattr(dist, name, function)


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.distributed
def test_numbers_of_the_last_stage_reach_the_writer_without_a_receive(tmp_path: Path) -> None:
    """Loss, its terms and router statistics of the last of two stages stand in the rows that rank 0 writes."""
    extra = MOE + "\n[train.cross_entropy]\nz_loss = 1e-2\n"
    keys = {**KEYS, "metrics.gradients_every_steps": 0}
    fit_reference(make_job(tmp_path / "alone", extra), **keys)
    given = {key.replace(".", "__"): value for key, value in keys.items()}
    job = make_job(tmp_path / "stages", extra)
    together(fit_on_ranks(2, job, NoBlockingReceive, **given, parallel__pp=2))
    wanted, got = metrics(tmp_path / "alone"), metrics(tmp_path / "stages")
    for name in ("loss", "loss.z_loss", "grad_norm", "moe.0.max_load", "moe.1.entropy"):
        assert got[name] == pytest.approx(wanted[name], rel=1e-4), name


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.distributed
def test_device_hours_count_the_ranks_of_each_attempt(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    keys = {"train.steps": 2, "sample.max_new_tokens": 0, "eval.every_steps": 0}
    fit_alone(job, **keys)
    given = {key.replace(".", "__"): value for key, value in keys.items()}
    together(fit_on_ranks(2, job, **{**given, "train__steps": 4}))
    found = metrics(tmp_path)
    spent = [b - a for a, b in itertools.pairwise([0.0, *found["seconds"]])]
    hours = [b - a for a, b in itertools.pairwise([0.0, *found["device_hours"]])]
    ranks = [3600 * hour / second for hour, second in zip(hours, spent)]
    assert [ranks[0], ranks[1], ranks[3]] == pytest.approx([1, 1, 2], rel=1e-9)
    assert 1 < ranks[2] <= 2 + 1e-9  # row 2 is begun before the end of the first life
