"""Values that are rejected where a layer, a loss, a plan or a pipeline meets them; no test starts a process."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forge_parallel import ParallelConfig, clip_grad_norm_
from forge_parallel._shared.problems import Problem, ProblemError
from forge_parallel.axes.collectives import NamedGroup
from forge_parallel.axes.context import context_parallel
from forge_parallel.axes.layers import Opaque, ShardedLogits, TPRegion
from forge_parallel.axes.roles import match_roles
from forge_parallel.axes.tensor import tensor_parallel
from forge_parallel.axes.vocab import vocab_fused_cross_entropy
from forge_parallel.check_model import BRANCH_IDS, check_shards, extra_problems
from forge_parallel.compute import Compute
from forge_parallel.config import Layout
from forge_parallel.meshes import Axis, Meshes
from forge_parallel.pipeline import Pipeline
from forge_parallel.plan import Profile, SearchSpace, auto_layout, find_hardware
from forge_parallel.points import POINTS, UnshardedPoints
from forge_parallel.prove.ranks import UnsupportedLayout, _width_of
from forge_parallel.prove.values import Reference
from forge_parallel.rules import mtp_problem
from forge_testing.problems import assert_problem, rejects

pytestmark = pytest.mark.lane("test")

CPU = torch.device("cpu")
ALONE = SimpleNamespace(group=None, size=1, rank=0)


@pytest.mark.parametrize(
    ("keys", "key", "value", "code"),
    [
        ({"timeout_seconds": float("nan")}, "timeout_seconds", float("nan"), "finite"),
        ({"tp": 0}, "tp", 0, "range"),
        ({"dp_shard": 0}, "dp_shard", 0, "range"),
        ({"layout": "auto", "tp": 2}, "layout", "auto", "excludes"),
        ({"async_tp": True}, "async_tp", True, "requires"),
        ({"pp_stages_per_rank": 3}, "pp_stages_per_rank", 3, "schedule"),
        ({"cpu_offload": True, "tp": 2}, "cpu_offload", True, "excludes"),
        ({"param_dtype": "bf16", "precision": "fp32"}, "param_dtype", "bf16", "precision"),
        ({"float8": "rowwise", "precision": "fp32"}, "float8", "rowwise", "precision"),
        ({"float8_all_gather": True}, "float8_all_gather", True, "requires"),
        ({"recompute_every": 2}, "recompute_every", 2, "requires"),
        ({"recompute": "selective", "compile": True}, "recompute", "selective", "excludes"),
        ({"memory_budget": 0.5}, "memory_budget", 0.5, "range"),
    ],
)
def test_values_of_a_layout(keys: dict[str, Any], key: str, value: object, code: str) -> None:
    with rejects(key, value, code):
        ParallelConfig(**keys)


@pytest.mark.parametrize(
    ("keys", "key", "value", "code"),
    [
        ({"tp": 3}, "dp_shard", -1, "divides"),
        ({"dp_shard": 3}, "dp_shard", 3, "world_size"),
        ({"ep": 3}, "ep", 3, "divides"),
        ({"tp": 4}, "tp", 4, "node"),
    ],
)
def test_axes_of_eight_ranks_on_nodes_of_two(
    keys: dict[str, Any], key: str, value: object, code: str
) -> None:
    with rejects(key, value, code):
        ParallelConfig(**keys).axes(8, 2)


class Attentive(nn.Module):
    """Attention by an exchangeable function, and masks over whole sequences."""

    mask_inputs = extra_inputs = ("ids",)

    def __init__(self) -> None:
        super().__init__()
        self.attend: Any = SimpleNamespace(is_causal=True)


class Tokens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.long()


def test_values_of_tensor_and_context_parallelism() -> None:
    mesh = SimpleNamespace(get_group=None, ndim=2, mesh_dim_names=("dp", "tp"))
    with rejects("mesh", ("dp", "tp"), "axes"):
        NamedGroup.of(mesh)
    axis = SimpleNamespace(group=None, size=2, rank=0)
    with rejects("ids", ..., "mask_inputs"):
        context_parallel(Attentive(), axis)
    model = Attentive()
    model.mask_inputs = ()  # type: ignore[assignment]
    attend = context_parallel(model, axis).attend
    with rejects("scores", ..., "gradient"):
        attend.scores(torch.ones(1, 2, 1, 4, requires_grad=True), torch.ones(1, 2, 1, 4))

    model = nn.ModuleDict({"head": nn.Linear(4, 5)})
    model.config = SimpleNamespace(final_logit_softcapping=1.0)  # type: ignore[assignment]
    matched = match_roles(model, {"head.*": "sharded_logits"})
    with rejects("head", 5, "softcap"):
        check_shards(model, matched, 2)
    model["head"].weight.device_mesh = None  # as a DTensor has one
    with rejects("head.weight", ..., "sharded"):
        check_shards(model, matched, 2)
    model = nn.ModuleDict({"head": nn.Identity()})
    with rejects("head", ..., "weight"):
        tensor_parallel(model, ALONE, matched=match_roles(model, {"head": "sharded_logits"}))


def test_streams_of_opaque_modules_and_widths_of_logits() -> None:
    opaque: Any = type("OpaqueTokens", (Opaque, Tokens), {})()
    opaque.tp = TPRegion(NamedGroup("", 1, 0), False)
    with rejects("opaque", "OpaqueTokens", "input"):
        opaque(torch.zeros(1, 2, dtype=torch.int64))
    with rejects("opaque", ..., "output"):
        opaque(torch.zeros(1, 2, 4))
    head: Any = type("Head", (ShardedLogits, nn.Linear), {})(4, 6)
    head.tp, head.tp_width = TPRegion(NamedGroup("", 1, 0), False), 5
    with rejects("logits", (1, 2, 6), "width"):
        head(torch.zeros(1, 2, 4))


def test_a_rank_without_ids_is_rejected() -> None:
    three = SimpleNamespace(group=None, size=3, rank=0)
    x, weight = torch.zeros(2, 8), torch.zeros(2, 8)
    with rejects("vocab_size", 4, "empty"):
        vocab_fused_cross_entropy(x, weight, torch.zeros(2).long(), three, vocab_size=4)


def compute(model: nn.Module, **options: Any) -> Compute:
    sizes = {"micro_batch": 1, "num_micro_batches": 1, "seq_len": 4}
    return Compute(model, ParallelConfig(tp=2), Meshes(CPU), loss=torch.sum, **sizes, **options)


def test_losses_that_a_layout_does_not_have() -> None:
    model = nn.Linear(2, 2)
    with rejects("objective", ..., "excludes"):
        compute(model, objective=lambda model, part: ()).sequence_losses(None)  # type: ignore[arg-type]
    model.tp_width = 1
    with rejects("parallel.tp", 2, "logits"):
        compute(model)


@pytest.mark.parametrize(
    ("masks", "extras", "given", "sizes", "problem"),
    [
        ((), (), (BRANCH_IDS,), {}, ("model.name", ..., "branches")),
        ((), ("images",), (), {}, ("model.name", ..., "extras")),
        (("ids",), ("images",), ("ids", "images"), {"cp": 2}, ("parallel.cp", 2, "mask_inputs")),
        ((), ("images",), ("images",), {"cp": 2, "tp": 2}, ("parallel.cp", 2, "tp")),
        ((), ("images",), ("images",), {"cp": 2}, ("parallel.cp", 2, "after_embedding")),
    ],
)
def test_extras_that_a_model_cannot_get(
    masks: Any, extras: Any, given: Any, sizes: dict[str, int], problem: Any
) -> None:
    model: Any = nn.Linear(2, 2)
    model.mask_inputs, model.extra_inputs = masks, extras
    layout = Layout(**{"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "ep": 1, **sizes})  # fmt: skip
    batch: Any = SimpleNamespace(extras=dict.fromkeys(given))
    assert_problem(ProblemError(extra_problems(model, batch, layout)), *problem)


def test_numbers_of_norms_schedules_and_hardware() -> None:
    with rejects("norm_type", 3.0, "unknown"):
        clip_grad_norm_([], 1.0, norm_type=3.0)
    found = mtp_problem(ParallelConfig(pp=2, pp_schedule="dualpipev"), 1)
    assert found is not None
    assert_problem(ProblemError([found]), "pp_schedule", "dualpipev", "ahead")
    with rejects("gpu", "h900", "unknown"):
        find_hardware("h900")


def test_a_stage_hands_on_what_the_next_one_waits_for() -> None:
    pipeline = object.__new__(Pipeline)
    pipeline._stream = torch.empty(1, 2, 4, device="meta")
    stage: Any = SimpleNamespace(pipeline_stage=0)
    with rejects("stage", 0, "stream"):
        pipeline._check_stream(stage, None, torch.zeros(1, 2, 5))
    with rejects("pp", ..., "stream", UnsupportedLayout):
        _width_of(Reference({}, {(0, "stream"): {}}))


def test_a_plan_without_a_layout_or_memory() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
    gpu = find_hardware("h200")
    space = SearchSpace(Profile(model, 4), ParallelConfig(device="cpu"), 1, 2, gpu, 1)
    with rejects("world_size", 1, "memory"):
        auto_layout(replace(space, hardware=replace(gpu, memory=1.0)))
    none = replace(space, refuses=lambda config: [Problem("tp", "own", 1, "is small")])
    with rejects("global_batch", 2, "layout"):
        auto_layout(none)


@pytest.mark.parametrize(
    ("point", "path", "code"),
    [
        ("mine", "layers.1", "kind"),
        ("resid_post", "layers.0.part", "opaque"),
        ("q", "layers.1", "rowwise"),
        ("logits", "head", "head"),
    ],
)
def test_hook_points_of_which_ranks_have_parts(point: str, path: str, code: str) -> None:
    whole = object.__new__(UnshardedPoints)
    whole.meshes, whole.tp = Meshes(CPU, tp=Axis(size=2)), NamedGroup("", 2, 0)
    whole.kinds, whole._opaque, whole._ids = POINTS, ["layers.0"], None
    place = SimpleNamespace(point=point, path=path, kind="output", module=nn.Module())
    with rejects("point", f"{path}.{point}", code):
        whole.check(f"{path}.{point}", place)


def test_several_stages_and_too_many_bytes_of_hook_points() -> None:
    config = ParallelConfig(pp=2, pp_schedule="interleaved_1f1b")
    model = nn.Module()
    model.__dict__["pipeline_stages"] = [nn.Module(), nn.Module()]
    with rejects("pp_schedule", "interleaved_1f1b", "stages"):
        UnshardedPoints(model, config, Meshes(CPU))
    whole: Any = object.__new__(UnshardedPoints)
    whole.meshes, whole._of_stages = Meshes(CPU, pp=Axis(size=2)), lambda value: [value]
    with rejects("max_bytes", 7, "range"):
        next(whole.exchange({"q": [torch.zeros(2)]}, 7))
