"""A run with images begins with the weights of a text model: all of them, or a refusal that names the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_testing.problems import rejects
from forge_testing.runs import fit_alone, fit_on_ranks, saved_tensors
from forge_testing.vlm_jobs import write_vlm_job
from forge_train import ConfigError, Trainer, load_job, read_run
from forge_train.loop.fork import find_fork

SIZES = {"dim": 16, "num_layers": 2, "num_heads": 2, "max_seq_len": 16, "init_std": 0.2}


def text_run(folder: Path, **keys: Any) -> Path:
    """A text model of the same sizes after two steps on the same tokens, without images."""
    model = {"name": "transformer", "vocab_size": 16, **SIZES, **keys}
    flat = {f"model.{key}": value for key, value in model.items()}
    source = {"data.sources.squares.options": {"group": 1, "text": 1}}
    fit_alone(write_vlm_job(folder), **flat, **source, **{"train.steps": 2})
    return folder / "run"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("fusion", ["joint_decoder", "cross_attention"])
def test_F70_all_weights_of_the_text_are_taken_by_a_fresh_run(tmp_path: Path, fusion: str) -> None:
    parent = text_run(tmp_path / "text")
    options = {"model.fusion.name": fusion}
    if fusion == "cross_attention":
        options["data.sources.squares.options"] = {"places": 1}
    keys = {**options, "init.from": str(parent), "checkpoint.every_steps": 1, "train.steps": 1}
    job = write_vlm_job(tmp_path / "vlm")
    flags = {key.replace(".", "__"): value for key, value in keys.items()}
    ranks = fit_on_ranks(
        2, job, None, **{**flags, "optimizer__lr": 1e-30, "optimizer__weight_decay": 0.0}
    )
    assert {r.problems for r in ranks} == {()}
    mine, theirs = saved_tensors(tmp_path / "vlm/run"), saved_tensors(parent)
    taken = [n for n in theirs if n.startswith("model.")]
    assert taken
    for name in taken:
        assert torch.equal(mine[name], theirs[name]), name
    (fork,) = (e for e in read_run(tmp_path / "vlm/run").events if e["event"] == "fork")
    report = json.loads((tmp_path / "vlm/run/parent.json").read_text())
    assert (fork["copied"], fork["unused"]) == (len(taken), 0)
    assert {n.split(".")[0] for n in report["fresh"]} >= {"vision", "adapter"}


@pytest.mark.parametrize(
    ("text", "here", "key", "value", "code"),
    [
        ({"qk_norm": True}, {}, "model.qk_norm", False, "changed"),
        ({"qk_norm": True}, {}, "init.from", "text/run", "unused"),
        ({"rope_theta": 500.0}, {}, "model.rope_theta", 10000.0, "changed"),
        ({"dim": 32}, {}, "model.dim", 16, "changed"),
        ({}, {"model.fusion.name": "moma"}, "model.fusion.name", "moma", "initial"),
    ],
    ids=str,
)
def test_weights_that_would_be_lost_are_rejected(
    tmp_path: Path, text: dict[str, Any], here: dict[str, Any], key: str, value: Any, code: str
) -> None:
    parent = text_run(tmp_path / "text", **text)
    job = write_vlm_job(tmp_path / "vlm")
    with rejects(key, str(parent) if key == "init.from" else value, code, ConfigError):
        Trainer(load_job(job, {**here, "init.from": str(parent)}))
    assert not (tmp_path / "vlm/run").exists()


@pytest.mark.slow
def test_a_part_is_taken_where_it_is_asked_for(tmp_path: Path) -> None:
    parent = text_run(tmp_path / "text", qk_norm=True)
    job = write_vlm_job(tmp_path / "vlm")
    trainer = Trainer(load_job(job, {"init.from": str(parent), "init.patterns": ["*"]}))
    fork = find_fork(trainer.job, trainer.model, trainer.loader, trainer.total_steps)
    assert fork is not None
    assert {n.rpartition(".mixer.")[2] for n in fork.weights.unused} == {
        "q_norm.weight",
        "k_norm.weight",
    }
