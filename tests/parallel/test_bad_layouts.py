"""Layouts that cannot run are refused from the description alone: value, rule, fix, and no process started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import forge_resilience
from forge_testing import write_job
from forge_train import ConfigError, cli, load_job
from forge_train.trainer.layout import layout_problems

pytestmark = pytest.mark.lane("test")

WIDE = {"model.num_layers": 4, "model.num_heads": 4, "model.dim": 32}
MOE = {"model.moe.num_experts": 8}

# overrides, ranks, ranks of a node, what must be said: the value and the fix
KINDS: dict[str, tuple[dict[str, Any], int, int, tuple[str, str]]] = {
    "tp 0": ({"parallel.tp": 0}, 2, 2, ("tp 0 must be at least 1", "use 1")),
    "cp 0": ({"parallel.cp": 0}, 2, 2, ("cp 0 must be at least 1", "use 1")),
    "pp 0": ({"parallel.pp": 0}, 2, 2, ("pp 0 must be at least 1", "use 1")),
    "ep 0": ({"parallel.ep": 0}, 2, 2, ("ep 0 must be at least 1", "use 1")),
    "no copies": ({"parallel.dp_replicate": 0}, 2, 2, ("dp_replicate 0", "use 1")),
    "no shards": ({"parallel.dp_shard": 0}, 2, 2, ("dp_shard 0", "use -1")),
    "auto and an axis": (
        {"parallel.layout": "auto", "parallel.tp": 2}, 2, 2, ("tp 2", "remove the axes")),
    "async tp on a CPU": (
        {"parallel.async_tp": True, "parallel.tp": 2}, 2, 2, ("device cpu", "async_tp = false")),
    "unknown schedule": ({"parallel.pp_schedule": "2f2b"}, 2, 2, ("2f2b", "1f1b")),
    "unknown exchange": ({"parallel.cp_exchange": "post"}, 2, 2, ("post", "all_gather")),
    "stages of a schedule": (
        {"parallel.pp": 2, "parallel.pp_stages_per_rank": 3}, 2, 2, ("3 must fit", "leave it out")),
    "offload with tp": (
        {"parallel.cpu_offload": True, "parallel.tp": 2}, 2, 2, ("tp is 2", "cpu_offload = false")),
    "float8 in fp32": ({"parallel.float8": "rowwise"}, 2, 2, ("rowwise", "precision = 'bf16'")),
    "float8 all-gather": (
        {"parallel.float8_all_gather": True, "parallel.precision": "bf16",
         "parallel.float8": "rowwise"}, 2, 2, ("float8 is rowwise", "tensorwise")),
    "float8 and few tokens": (
        {"parallel.device": "auto", "parallel.precision": "bf16", "parallel.float8": "tensorwise",
         "parallel.cp": 2, "data.seq_len": 20, "train.micro_batch": 1}, 2, 2, ("they are 10", "divisible by 32")),
    "unknown recomputation": ({"parallel.recompute": "some"}, 2, 2, ("some", "none")),
    "every 0th": ({"parallel.recompute_every": 0}, 2, 2, ("recompute_every 0", "use 1")),
    "every 2nd of none": (
        {"parallel.recompute_every": 2}, 2, 2, ("recompute is none", "recompute = 'full'")),
    "budget without compile": (
        {"parallel.memory_budget": 0.5}, 2, 2, ("compile is False", "compile = true")),
    "node without GPUs": ({"parallel.gpus_per_node": 0}, 2, 2, ("gpus_per_node 0", "leave it out")),
    "axes that do not divide": ({"parallel.tp": 4}, 6, 6, ("tp 4 must divide the 6", "use 1, 2, 3, 6")),
    "axes that are too many": (
        {"parallel.tp": 2, "parallel.dp_shard": 4}, 4, 4, ("= 8 must be the 4 ranks", "8 processes")),
    "ep of too few ranks": (
        {"parallel.ep": 4, **MOE}, 2, 2, ("ep 4 must divide dp_shard x cp x tp = 2", "use 1, 2")),
    "tp across nodes": (
        {"parallel.tp": 4, **WIDE}, 8, 2, ("tp 4 must stay inside a node of 2", "across_nodes")),
    "ep across nodes": (
        {"parallel.ep": 8, **MOE}, 8, 4, ("ep 8 must stay inside a node of 4", "across_nodes")),
    "heads": ({"parallel.tp": 4}, 4, 4, ("num_heads 2 must be divisible by parallel.tp 4", "use tp 1, 2")),
    "key-value heads": (
{"parallel.tp": 2, "model.dim": 48, "model.num_heads": 6, "model.num_kv_heads": 3}, 2, 2,
        ("num_kv_heads 3 must be divisible by parallel.tp 2, or divide it", "use tp 1")),
    "hidden width": (
        {"parallel.tp": 4, **WIDE, "model.hidden_dim": 66}, 4, 4, ("hidden_dim 66", "use tp 1, 2")),
    "sequence and cp": (
        {"parallel.cp": 3}, 3, 3, ("data.seq_len 32 must be divisible by 6 with parallel.cp 3", "use 30 or 36")),
    "sequence and tp": (
        {"parallel.tp": 2, **WIDE, "data.seq_len": 31}, 2, 2, ("seq_len 31", "use 30 or 32")),
    "experts and ep": (
        {"parallel.ep": 4, "model.moe.num_experts": 6}, 4, 4, ("num_experts 6", "use ep = 1, or 4")),
    "capacity and tp": (
        {"parallel.tp": 2, **MOE, "model.moe.capacity_factor": 1.25},
        2,
        2,
        ("capacity_factor 1.25", "or no capacity"),
    ),
    "expert choice and cp": (
        {
            "parallel.cp": 2,
            **MOE,
            "model.moe.router": "expert_choice",
            "eval.every_steps": 0,
            "sample.max_new_tokens": 0,
        },
        2,
        2,
        ("expert_choice", "or another router"),
    ),
    "a vocabulary that torch misplaces": (
        {"parallel.tp": 2, "model.dim": 36, "model.num_heads": 2, "train.global_batch": 8},
        16,
        16,
        ("vocab_size 257 of width 36 over parallel.tp 2 and 8 shards", "or the width by 8", "use 258 ids"),
    ),
    "layers and stages": (
        {"parallel.pp": 2, "train.micro_batch": 1}, 2, 2, ("num_layers 1", "or more layers")),
    "tied weights in a V": (
        {"parallel.pp": 2, **WIDE, "model.tie_embeddings": True, "train.micro_batch": 1,
         "parallel.pp_schedule": "zbv_zero_bubble"}, 2, 2, ("tie_embeddings", "untie")),
    "optimizer without names in a pipeline": (
        {"parallel.pp": 2, **WIDE, "train.micro_batch": 1,
         "optimizer.name": "forge_testing.models:PlainSGD"}, 2, 2, ("PlainSGD", "pp = 1")),
}  # fmt: skip


@pytest.mark.lane("quick")
@pytest.mark.parametrize("kind", KINDS)
def test_a_layout_that_cannot_run_is_refused(tmp_path: Path, kind: str) -> None:
    overrides, world, per_node, wanted = KINDS[kind]
    try:
        problems = layout_problems(load_job(write_job(tmp_path), overrides).config, world, per_node)
    except ConfigError as error:
        problems = error.lines
    assert any(all(part in problem for part in wanted) for problem in problems), problems


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize("kind", ["heads", "layers and stages", "axes that do not divide"])
def test_the_command_refuses_before_it_starts_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    overrides, world, _, wanted = KINDS[kind]
    started: list[object] = []
    monkeypatch.setattr(forge_resilience, "run_local_workers", lambda *args: started.append(args))
    flags = [f"--{key}={value}" for key, value in overrides.items()]
    code = cli._dispatch(["run", str(write_job(tmp_path)), "--nproc", str(world), *flags])
    said = capsys.readouterr().err
    assert code == 78
    assert all(part in said for part in wanted), said
    assert not started
    assert not (tmp_path / "run").exists()
