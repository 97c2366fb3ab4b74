"""The planner against Forge's own models: they keep, hold and count what it says."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge_core import (
    AttentionSpec,
    OptimizerConfig,
    RopeScaling,
    build_optimizer,
    flops_per_token,
    initialize,
)
from forge_core.model import LayerType, MLAConfig
from forge_core.optim import EMAConfig
from forge_moe.model_section import MoESection
from forge_parallel import ParallelConfig, make_meshes, materialize, parallelize, store_parameters
from forge_parallel.plan import (
    Candidate,
    Profile,
    Storage,
    estimate_layout,
    find_hardware,
    local_numel,
    render,
    trace,
)
from forge_testing import device, run_on_ranks
from forge_testing.counts import bytes_kept
from forge_testing.problems import rejects
from forge_testing.processes import forge_train
from forge_testing.runs import make_job
from forge_train import ConfigError, load_job, plan
from forge_train.build.build import build_model
from forge_train.cli import main
from forge_train.config.model import BuiltInModelConfig
from forge_train.loop.assemble import shard_experts
from forge_train.plan import PlanFlags, choose_layout, show_plan

pytestmark = pytest.mark.lane("test")

SEQ = 64
MOE = {"moe": MoESection(num_experts=8, top_k=2)}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "gelu": {"feed_forward": "gelu", "norm": "layer_norm"},
    "qk_norm": {"qk_norm": True},
    "tied": {"tie_embeddings": True},
    "post_norm": {"block": "post_norm", "feed_forward": "relu2", "residual_scale": 0.5},
    "sandwich": {
        **{"block": "sandwich", "norm": "rms_norm_plus_one", "feed_forward": "geglu_tanh"},
        **{"qk_norm": True, "embedding_scale": 8.0, "logits_scale": 0.5, "logits_softcap": 30.0},
    },
    "mla": {
        "num_kv_heads": None,
        "mixer": "mla",
        "mla": MLAConfig(
            q_lora_rank=48,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
        ),
        "rope_scaling": RopeScaling(2.0, name="yarn", original_max_position=32),
    },
    "moe": MOE,
    "moe_clamped": {
        "moe": MoESection(
            num_experts=8, top_k=2, activation="clamped_swiglu", bias=True, router_bias=True
        )
    },
    "moe_shared": {
        "moe": MoESection(num_experts=8, top_k=2, num_shared_experts=1, first_dense_layers=1,
                          z_loss_weight=1e-3, aux_loss_weight=1e-2)
    },
}  # fmt: skip


def section(name: str) -> BuiltInModelConfig:
    return BuiltInModelConfig(
        **{
            **{"vocab_size": 256, "dim": 64, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2},
            **MODELS[name],
        }
    )


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_activations_are_what_a_real_forward_keeps(name: str, dtype: torch.dtype) -> None:
    config = section(name)
    if config.moe is not None and dtype == torch.bfloat16:
        # few tokens run as one padded batch on a CPU, which keeps more; the planner traces what large ones do
        config = replace(config, moe=replace(config.moe, backend="grouped_mm"))
    profile = Profile(build_model(config, 0), SEQ)
    found = trace(profile, dtype=dtype, rows=2)
    blocks = sum(found.kinds[k].saved for k in profile.order)
    model = materialize(build_model(config, 0), torch.device("cpu"))
    initialize(model, 0)
    for module in model.modules():
        if getattr(module, "compute_dtype", None) is None:  # a router stays in fp32
            for p in module.parameters(recurse=False):
                p.data = p.data.to(dtype)
    tokens = torch.randint(0, 256, (2, SEQ), generator=torch.Generator().manual_seed(0))
    measured = bytes_kept(model, tokens)
    said = found.first.saved + found.last.saved + found.shared + blocks
    assert said == pytest.approx(measured, rel=0.1)


@pytest.mark.lane("quick")
def test_a_tied_head_sees_all_tokens_under_tensor_parallelism() -> None:
    tied, own = (trace(Profile(build_model(section(n), 0), SEQ), tp=2) for n in ("tied", "dense"))
    assert (tied.logits, tied.last.sent) == (own.logits, own.last.sent)


@pytest.mark.lane("quick")
def test_latents_travel_to_the_heads_of_all_ranks() -> None:
    """48 + 32 + 8 dims of each token in bf16, in place of the stream's 64; the last are a view of 32 + 8."""
    latent, plain = (
        trace(Profile(build_model(section(n), 0), SEQ), tp=2).kinds[0].sent["tp"]
        for n in ("mla", "dense")
    )
    dims = (latent - plain) / (2 * SEQ) + 64
    assert 48 + 32 + 8 <= dims <= 48 + 32 + 40


def test_no_plan_spreads_rows_whose_attention_cannot_reach_over_ranks() -> None:
    plain = section("dense")
    cp_problems = {
        spec: bool(Profile(build_model(replace(plain, attention=spec), 0), SEQ).cp_problems)
        for spec in (
            AttentionSpec(),
            AttentionSpec(scale=0.5),
            AttentionSpec(window=4, softcap=2.0),
        )
    }
    assert list(cp_problems.values()) == [False, False, True]


def test_local_layers_are_a_kind_of_their_own() -> None:
    plain = section("dense")
    types = {"local": LayerType(window=8)}
    mixed = replace(plain, layer_pattern=("local", "local", "global"), layer_types=types)
    profile = Profile(build_model(mixed, 0), SEQ)
    assert profile.order == [0, 0, 1, 0]
    assert profile.kinds[0].flops < profile.kinds[1].flops
    assert 3 * profile.flops == pytest.approx(flops_per_token(build_model(mixed, 0), SEQ))


def _held(options: dict[str, Any]) -> int:
    config = ParallelConfig(device=device().type, **options)
    meshes = make_meshes(config)
    model = build_model(section("moe"), 0)
    shard_experts(model, SimpleNamespace(model=section("moe"), parallel=config), meshes)  # type: ignore[arg-type]
    model = parallelize(model, config, meshes)
    return sum(p.to_local().numel() for p in model.parameters())  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.distributed
@pytest.mark.parametrize(
    "options",
    [{}, {"ep": 2}, {"ep": 4}, {"tp": 2}, {"tp": 2, "ep": 2}, {"dp_replicate": 2, "ep": 2}],
    ids=str,
)
def test_experts_lie_where_the_plan_has_them(options: dict[str, Any]) -> None:
    profile = Profile(build_model(section("moe"), 0), SEQ)
    config = ParallelConfig(device=device().type, **options)
    candidate = Candidate(profile, config, 4, 16, 1, find_hardware("h200"), 4, Storage())
    groups = candidate.load(0).groups
    planned = sum(local_numel(param, candidate) for group in groups for param in group.params)
    assert planned == run_on_ranks(4, _held, options)[0]


@pytest.mark.parametrize("name", MODELS)
def test_flops_and_parameters_are_those_of_the_model(name: str) -> None:
    model = build_model(section(name), 0)
    profile = Profile(model, SEQ)
    assert 3 * profile.flops == pytest.approx(flops_per_token(model, SEQ))
    assert profile.numel == sum(p.numel() for p in model.parameters())


def test_experts_travel_once_to_each_rank_that_has_some_of_theirs() -> None:
    model = build_model(section("moe"), 0)

    def received(ep: int) -> float:
        plan = estimate_layout(model, ParallelConfig(ep=ep, recompute="none"), 8, global_batch=8,
                         micro_batch=1, seq_len=SEQ)  # fmt: skip
        return {t.axis: t.whole for t in plan.traffic}["ep"]

    tokens, layers, passes = SEQ * 64 * 2, 4, 2
    # two of eight experts: with one expert a rank always two ranks, with four a rank often one
    assert received(8) == pytest.approx(2 * passes * layers * tokens * 2)
    assert received(2) == pytest.approx(2 * passes * layers * tokens * 2 * (1 - 6 / 28))


@pytest.mark.lane("quick")
@pytest.mark.parametrize("decay", [None, 0.9])
@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
def test_state_of_an_optimizer_is_what_it_holds(name: str, decay: float | None) -> None:
    """On one rank, where nothing is padded; and in the checkpoint."""
    config: Any = load_job(PRESET / "7b_8gpu.toml", with_data=False).config
    config = replace(
        config, model=section("moe"), optimizer=OptimizerConfig(name, ema=EMAConfig(decay))
    )
    space = plan._space(config, 1, 1, find_hardware("h200"))
    profile = space.profile
    optimizer = build_optimizer(
        build_model(config.model, 0).to_empty(device=device().type), config.optimizer
    )
    if decay is not None:
        optimizer.eval()
    slots = [value for own in optimizer.named_state().values() for value in own.values()]
    held = sum(4 * value.numel() for value in slots if isinstance(value, torch.Tensor))
    found = estimate_layout(
        profile, ParallelConfig(), 1, global_batch=8, gpus_per_node=1, storage=space.storage
    )
    assert found.memory[0].moments == held == found.checkpoint - 4 * profile.numel


SLOW = [pytest.mark.slow, pytest.mark.lane("ci")]


# Schedule-free weights in bf16 are rejected.
STORED = [
    pytest.param(name, weights, marks=[] if name in ("adamw", "muon") else SLOW)
    for name in ("adamw", "lion", "muon", "schedule_free_adamw")
    for weights in ("fp32", "bf16")
    if (name, weights) != ("schedule_free_adamw", "bf16")
]


@pytest.mark.parametrize("state", ["fp32", "bf16"])
@pytest.mark.parametrize(("name", "weights"), STORED)
def test_what_is_stored_in_bf16_is_counted_as_it_is_held(
    name: str, weights: str, state: str
) -> None:
    """Weights, gradients and an optimizer's state, on one rank."""
    config: Any = load_job(PRESET / "7b_8gpu.toml", with_data=False).config
    own = OptimizerConfig(name, state_dtype=state)  # type: ignore[arg-type]
    parallel = replace(config.parallel, param_dtype=weights, dp_shard=1)
    config = replace(config, model=section("dense"), optimizer=own, parallel=parallel)
    space = plan._space(config, 1, 1, find_hardware("h200"))
    profile = space.profile
    model = build_model(config.model, 0).to_empty(device=device().type)
    store_parameters(model, weights)
    optimizer = build_optimizer(model, own)
    slots = [value for slots in optimizer.state.values() for value in slots.values()]
    held = sum(value.nbytes for value in slots if value.ndim)
    found = estimate_layout(
        profile, parallel, 1, global_batch=8, gpus_per_node=1, storage=space.storage
    ).memory[0]
    assert found.moments == held
    assert found.weights == found.gradients == sum(p.nbytes for p in model.parameters())


# ---- the command and layout = "auto"

PRESET = Path(__file__).parents[2] / "configs" / "presets"


def run_plan(*args: str) -> int:
    try:
        main(["plan", *args])
    except SystemExit as left:
        return int(left.code or 0)
    raise AssertionError("the command returned")


@pytest.mark.slow
def test_the_command_prints_tables_and_leaves_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan(str(PRESET / "7b_8gpu.toml"), "--gpus", "8", "--nodes", "2") == 0
    out = capsys.readouterr().out
    assert "fsdp 8: ranks 0, 1" in out
    assert {"8.03", "8", "h200", "2", "4", "96.4", "MFU"} <= set(re.findall(r"[\w.]*\w", out))


@pytest.mark.slow
def test_what_a_run_never_trains_has_neither_gradients_nor_moments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All is stored in fp32; a stage trains the head later, and nothing the embedding."""
    job = tmp_path / "job.toml"
    groups = [f'[optimizer.groups.{name}]\npatterns = ["{name}.*"]\nlr_multiplier = 0\n'
              for name in ("embedding", "lm_head")]  # fmt: skip
    late = "[train.stages.late]\nstart_step = 10\nlr_multipliers = {lm_head = 1.0}\n"
    job.write_text("\n".join([f'extends = "{PRESET / "7b_8gpu.toml"}"', *groups, late]))
    assert run_plan(str(job), "--gpus", "8", "--json") == 0
    (rank,) = json.loads(capsys.readouterr().out)["memory"]
    assert rank["weights"] - rank["gradients"] == 4 * 128256 * 4096 / 8
    assert rank["moments"] == 2 * rank["gradients"]


@pytest.mark.slow
def test_weights_with_adapters_are_held_in_16_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for dtype in ("bf16", "fp32"):
        job = tmp_path / "job.toml"
        table = f'[lora]\nrank = 8\npatterns = ["*.q_proj"]\nbase_dtype = "{dtype}"\n'
        job.write_text(f'extends = "{PRESET / "7b_8gpu.toml"}"\n{table}')
        assert run_plan(str(job), "--gpus", "8", "--json") == 0
        plan = json.loads(capsys.readouterr().out)
        (found[dtype],) = plan["memory"]
    adapters = 32 * 8 * (4096 + 4096) / 8  # elements of 32 layers on a rank
    assert found["bf16"]["gradients"] == found["fp32"]["gradients"] == 4 * adapters
    assert found["bf16"]["moments"] == 8 * adapters
    frozen = found["fp32"]["weights"] - 4 * adapters
    assert found["bf16"]["weights"] == frozen / 2 + 4 * adapters
    assert plan["checkpoint"] == 12 * adapters * 8


@pytest.mark.slow
def test_too_little_memory_leaves_with_78_after_the_tables(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_plan(str(PRESET / "70b_32gpu.toml"), "--gpus", "8", "--json") == 78
    out, err = capsys.readouterr()
    assert json.loads(out)["fits"] is False
    assert {"222", "120", "h200"} <= set(re.findall(r"\w+", err))


#: Keys of the words in a fix that are not keys of [parallel].
_KEYS = {key: key for key in ("optimizer.state_dtype", "parallel.param_dtype")} | {
    "micro_batch": "train.micro_batch"
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "layout", "gpus", "fixes"),
    [
        ("adamw", "auto", 1, ["optimizer.state_dtype", "parallel.param_dtype"]),
        ("schedule_free_adamw", "manual", 1, []),
        ("adamw", "manual", 2, ["optimizer.state_dtype"]),
    ],
)
def test_F176_smaller_types_are_tried_before_more_gpus_are_asked_for(
    optimizer: str, layout: str, gpus: int, fixes: list[str]
) -> None:
    """8 B parameters: the fix, taken as flags, fits."""
    recipe = PRESET.parent / "recipes" / "7b.toml"
    gpu = PlanFlags(gpus=gpus, gpu="h200" if gpus == 1 else "h100")
    settings: dict[str, Any] = {"optimizer.name": optimizer, "parallel.layout": layout}
    settings["schedule.name"] = "constant"
    with pytest.raises(ConfigError) as refused:
        show_plan(load_job(recipe, settings, with_data=False).config, gpu)
    (problem,) = refused.value.problems
    assert problem.code == "memory"
    pairs = re.findall(
        r"([a-z_.]+) (\w+)", problem.fix.removeprefix("use ").replace("one rank, ", "")
    )
    flags = {_KEYS.get(key, f"parallel.{key}"): value for key, value in pairs}
    assert [key for key, value in flags.items() if value == "bf16"] == fixes
    if fixes:
        values = {k: int(v) if v.isdigit() else v for k, v in flags.items()}
        settings |= {"parallel.layout": "manual", **values}
        show_plan(load_job(recipe, settings, with_data=False).config, gpu)


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--gpus", "8", "--gpu", "h900"), "gpu 'h900' "),
        (("--gpus", "8", "--nodes", "3"), "--nodes 3 "),
        (("--gpus", "16", "--parallel.tp", "16"), "tp 16 "),
    ],
)
def test_models_that_cannot_be_planned_are_rejected(
    flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_plan(str(PRESET / "7b_8gpu.toml"), *flags) == 78
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_F101_what_uneven_shares_cost_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan(str(PRESET / "7b_8gpu.toml"), "--gpus", "48", "--train.micro_batch", "2") == 0
    lines = [re.findall(r"[\d.]+%?", line) for line in capsys.readouterr().out.splitlines()]
    assert ["48", "512", "2", "6", "12.5%"] in lines


def test_auto_on_cpus_is_fsdp_over_all_ranks() -> None:
    job = load_job(PRESET / "20m_4gpu.toml", {"parallel.layout": "auto"}, with_data=False)
    config, reasons = choose_layout(job, 4, 4)
    assert config == replace(job.config.parallel, layout="manual")
    assert {"FSDP", "4"} <= set(reasons[0].split())


@pytest.mark.slow
def test_a_run_starts_in_the_layout_that_is_chosen(tmp_path: Path) -> None:
    ended = forge_train(
        "run", make_job(tmp_path), "--parallel.layout", "auto", "--train.steps", "1"
    )
    assert ended.code == 0, ended.err


@pytest.mark.slow
def test_auto_on_gpus_chooses_alike_each_time_and_recomputes_only_if_it_must(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("forge_parallel.plan.this_gpu", lambda: find_hardware("h200"))
    recipe = PRESET.parent / "recipes" / "7b.toml"
    options = {"parallel.layout": "auto", "parallel.compile": True, "train.micro_batch": 4}
    job = load_job(recipe, options, with_data=False)
    config, reasons = choose_layout(job, 8, 8)
    assert (config.recompute, config.layout) == ("none", "manual")
    assert reasons == choose_layout(job, 8, 8)[1]
    large = load_job(recipe.with_name("70b.toml"), options, with_data=False)
    tight, _ = choose_layout(large, 16, 8)
    assert tight.recompute != "none" or tight.memory_budget is not None
    with rejects("world_size", 1, "memory", ConfigError, where="h200"):
        choose_layout(job, 1, 1)


#: GB (1e9): the allocator's peak of allocated bytes in 3 steps of `forge-train run` on one device that
#: computes nothing, torch 2.13 with CUDA as for an H200, eager: 1.24 B parameters, rows of 4096.
LARGE = {"vocab_size": 128256, "dim": 2048, "num_layers": 16, "num_heads": 32, "num_kv_heads": 8,
         "hidden_dim": 8192, "tie_embeddings": True, "max_seq_len": 4096}  # fmt: skip
EXPERTS = {"num_layers": 8, "moe": MoESection(num_experts=8)}
MEASURED: dict[str, tuple[dict[str, Any], dict[str, Any], int, int, float]] = {
    "micro_batch 1": ({}, {}, 4, 1, 31.57),
    "recompute full": ({}, {"recompute": "full"}, 4, 1, 25.84),
    "recompute selective": ({}, {"recompute": "selective"}, 4, 1, 29.16),
    "micro_batch 2, two": ({}, {}, 4, 2, 39.76),
    "micro_batch 2, one": ({}, {}, 2, 2, 34.81),
    "micro_batch 1, one": ({}, {}, 1, 1, 26.63),
    "experts": (EXPERTS, {}, 4, 1, 72.48),
    "fp32, shared heads": ({}, {"precision": "fp32"}, 4, 1, 38.10),
    "fp32": ({"num_kv_heads": 32}, {"precision": "fp32"}, 4, 1, 39.69),
}


@pytest.mark.lane("quick")
@pytest.mark.parametrize("name", MEASURED)
def test_F118_a_plan_is_not_below_the_allocators_peak(name: str) -> None:
    model, parallel, global_batch, micro_batch, measured = MEASURED[name]
    section = BuiltInModelConfig(**{**LARGE, **model})
    plan = estimate_layout(
        build_model(section, 0),
        ParallelConfig(**{"recompute": "none", **parallel}),
        1,
        global_batch=global_batch,
        micro_batch=micro_batch,
        seq_len=4096,
    )
    assert measured <= plan.peak / 1e9 <= 1.08 * measured


def test_F122_a_plan_has_how_often_cpu_offload_waits() -> None:
    config = ParallelConfig(cpu_offload=True, recompute="none")
    model = build_model(section("dense"), 0)
    said = {
        size: render(
            estimate_layout(model, config, 1, global_batch=4, micro_batch=size, seq_len=SEQ)
        )
        for size in (1, 4)
    }
    tensors = len(list(model.parameters()))
    assert re.search(rf"cpu_offload waits .*\b{3 * tensors}\b", said[1])
    assert "cpu_offload waits" not in said[4]
