"""Layouts that cannot run are refused from the description alone: value, rule, fix, and no process started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import forge_resilience
from forge_testing import write_job
from forge_testing.problems import assert_problem
from forge_train import ConfigError, cli, load_job
from forge_train.build.layout import layout_problems

pytestmark = pytest.mark.lane("test")

WIDE = {"model.num_layers": 4, "model.num_heads": 4, "model.dim": 32}
MOE = {"model.moe.num_experts": 8}

# overrides, ranks, ranks of a node, and the problem: key, value, code
KINDS: dict[str, tuple[dict[str, Any], int, int, tuple[str, Any, str]]] = {
    "tp 0": ({"parallel.tp": 0}, 2, 2, ("parallel.tp", 0, "range")),
    "cp 0": ({"parallel.cp": 0}, 2, 2, ("parallel.cp", 0, "range")),
    "pp 0": ({"parallel.pp": 0}, 2, 2, ("parallel.pp", 0, "range")),
    "ep 0": ({"parallel.ep": 0}, 2, 2, ("parallel.ep", 0, "range")),
    "no copies": ({"parallel.dp_replicate": 0}, 2, 2, ("parallel.dp_replicate", 0, "range")),
    "no shards": ({"parallel.dp_shard": 0}, 2, 2, ("parallel.dp_shard", 0, "range")),
    "auto and tp": (
        {"parallel.layout": "auto", "parallel.tp": 2}, 2, 2, ("parallel.layout", "auto", "excludes")),
    "async tp without CUDA": (
        {"parallel.async_tp": True, "parallel.tp": 2}, 2, 2, ("parallel.async_tp", True, "requires")),
    "unknown schedule": (
        {"parallel.pp_schedule": "2f2b"}, 2, 2, ("parallel.pp_schedule", "2f2b", "unknown")),
    "unknown exchange": (
        {"parallel.cp_exchange": "post"}, 2, 2, ("parallel.cp_exchange", "post", "unknown")),
    "stages and schedule": (
        {"parallel.pp": 2, "parallel.pp_stages_per_rank": 3}, 2, 2,
        ("parallel.pp_stages_per_rank", 3, "schedule")),
    "offload with tp": (
        {"parallel.cpu_offload": True, "parallel.tp": 2}, 2, 2, ("parallel.cpu_offload", True, "excludes")),
    "float8 in fp32": ({"parallel.float8": "rowwise"}, 2, 2, ("parallel.float8", "rowwise", "precision")),
    "reduction in bf16 and fp32": (
        {"parallel.reduce_dtype": "bf16"}, 2, 2, ("parallel.reduce_dtype", "bf16", "precision")),
    "float8 all-gather": (
        {"parallel.float8_all_gather": True, "parallel.precision": "bf16",
         "parallel.float8": "rowwise"}, 2, 2, ("parallel.float8_all_gather", True, "requires")),
    "float8 and few tokens": (
        {"parallel.device": "auto", "parallel.precision": "bf16", "parallel.float8": "tensorwise",
         "parallel.cp": 2, "data.seq_len": 20, "train.micro_batch": 1}, 2, 2,
        ("parallel.float8", "tensorwise", "tokens")),
    "unknown recomputation": (
        {"parallel.recompute": "some"}, 2, 2, ("parallel.recompute", "some", "unknown")),
    "selective with compile": (
        {"parallel.recompute": "selective", "parallel.compile": True}, 2, 2,
        ("parallel.recompute", "selective", "excludes")),
    "every 0th": ({"parallel.recompute_every": 0}, 2, 2, ("parallel.recompute_every", 0, "range")),
    "every 2nd of none": (
        {"parallel.recompute_every": 2}, 2, 2, ("parallel.recompute_every", 2, "requires")),
    "budget without compile": (
        {"parallel.memory_budget": 0.5}, 2, 2, ("parallel.memory_budget", 0.5, "range")),
    "no time": ({"parallel.timeout_seconds": 0.0}, 2, 2, ("parallel.timeout_seconds", 0.0, "finite")),
    "node without GPUs": (
        {"parallel.gpus_per_node": 0}, 2, 2, ("parallel.gpus_per_node", 0, "range")),
    "axes and ranks": ({"parallel.tp": 4}, 6, 6, ("parallel.dp_shard", -1, "divides")),
    "too many axes": (
        {"parallel.tp": 2, "parallel.dp_shard": 4}, 4, 4, ("parallel.dp_shard", 4, "world_size")),
    "ep of too few ranks": ({"parallel.ep": 4, **MOE}, 2, 2, ("parallel.ep", 4, "divides")),
    "tp across nodes": ({"parallel.tp": 4, **WIDE}, 8, 2, ("parallel.tp", 4, "node")),
    "ep across nodes": ({"parallel.ep": 8, **MOE}, 8, 4, ("parallel.ep", 8, "node")),
    "heads": ({"parallel.tp": 4}, 4, 4, ("model.num_heads", 2, "divides")),
    "key-value heads": (
        {"parallel.tp": 2, "model.dim": 48, "model.num_heads": 6, "model.num_kv_heads": 3}, 2, 2,
        ("model.num_kv_heads", 3, "divides")),
    "hidden width": (
        {"parallel.tp": 4, **WIDE, "model.hidden_dim": 66}, 4, 4, ("model.hidden_dim", 66, "divides")),
    "sequence and cp": ({"parallel.cp": 3}, 3, 3, ("data.seq_len", 32, "divides")),
    "sequence and tp": (
        {"parallel.tp": 2, **WIDE, "data.seq_len": 31}, 2, 2, ("data.seq_len", 31, "divides")),
    "experts and ep": (
        {"parallel.ep": 4, "model.moe.num_experts": 6}, 4, 4, ("parallel.ep", 4, "divides")),
    "capacity and tp": (
        {"parallel.tp": 2, **MOE, "model.moe.capacity_factor": 1.25}, 2, 2,
        ("model.moe.capacity_factor", 1.25, "whole_batch")),
    "expert choice and cp": (
        {"parallel.cp": 2, **MOE, "model.moe.router": "expert_choice", "eval.every_steps": 0,
         "sample.max_new_tokens": 0}, 2, 2, ("model.moe.router", "expert_choice", "whole_batch")),
    "a vocabulary that torch misplaces": (
        {"parallel.tp": 2, "model.dim": 36, "model.num_heads": 2, "train.global_batch": 8}, 16, 16,
        ("model.vocab_size", 257, "shards")),
    "layers and stages": (
        {"parallel.pp": 2, "train.micro_batch": 1}, 2, 2, ("model.num_layers", 1, "stages")),
    "tied weights in a V": (
        {"parallel.pp": 2, **WIDE, "model.tie_embeddings": True, "train.micro_batch": 1,
         "parallel.pp_schedule": "zbv_zero_bubble"}, 2, 2,
        ("parallel.pp_schedule", "zbv_zero_bubble", "tied")),
    "pipeline and optimizer without names": (
        {"parallel.pp": 2, **WIDE, "train.micro_batch": 1,
         "optimizer.name": "forge_testing.models:PlainSGD"}, 2, 2, ("parallel.pp", 2, "optimizer")),
}  # fmt: skip


@pytest.mark.lane("quick")
@pytest.mark.parametrize("kind", KINDS)
def test_a_layout_that_cannot_run_is_rejected(tmp_path: Path, kind: str) -> None:
    overrides, world, per_node, wanted = KINDS[kind]
    try:
        job = load_job(write_job(tmp_path), overrides)
        found = ConfigError(layout_problems(job.config, world, per_node))
    except ConfigError as error:
        found = error
    assert_problem(found, *wanted)


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize("kind", ["heads", "layers and stages", "axes and ranks"])
def test_the_command_rejects_layouts_before_it_starts_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    overrides, world, _, wanted = KINDS[kind]
    started: list[object] = []
    monkeypatch.setattr(forge_resilience, "run_local_workers", lambda *args: started.append(args))
    flags = [f"--{key}={value}" for key, value in overrides.items()]
    code = cli._dispatch(["run", str(write_job(tmp_path)), "--nproc", str(world), *flags])
    said = capsys.readouterr().err
    assert code == 78
    assert f"{wanted[0]} {wanted[1]!r}" in said
    assert not started
    assert not (tmp_path / "run").exists()
