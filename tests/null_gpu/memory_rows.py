"""Jobs whose memory is planned and measured: every preset of one GPU, and what else changes memory.

A job is a file below configs/ with flags. Recipes are cut where the whole would take minutes: fewer layers, two
micro-batches a step (a third takes no more memory).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"

#: Of all jobs: two steps and an evaluation of few rows.
SHORT = {
    "train.steps": 2,
    "train.tokens": None,
    "schedule.warmup_steps": 1,
    "eval.sequences": 8,
    "sample.max_new_tokens": 0,
    "metrics.console": "off",
}

#: How far the plan may be from the allocator's peak: on one GPU, and in a layout of several.
ONE, MANY = 0.05, 0.10


@dataclass(frozen=True)
class Job:
    """`config` is below configs/; `flags` are dotted keys."""

    name: str
    config: str
    flags: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    saves: bool = False

    @property
    def within(self) -> float:
        if "lora.rank" in self.flags:
            return MANY  # activations of frozen blocks are counted as those of trained ones
        return ONE if self.ranks == 1 else MANY

    @property
    def all_flags(self) -> dict[str, Any]:
        return SHORT | self.flags


def _of_1b(name: str, ranks: int = 1, saves: bool = False, **flags: Any) -> Job:
    base = {"train.micro_batch": 1, "train.global_batch": 2 * ranks}
    given = {key.replace("__", "."): value for key, value in flags.items()}
    return Job(name, "recipes/1b.toml", base | given, ranks, saves)


def _of(model: str, name: str, ranks: int = 1, **flags: Any) -> Job:
    base = {"train.micro_batch": 1, "train.global_batch": 2 * ranks}
    given = {key.replace("__", "."): value for key, value in flags.items()}
    return Job(f"{model} {name}".strip(), f"recipes/{model}.toml", base | given, ranks)


PRESETS = [
    Job(p.stem, f"presets/{p.name}") for p in sorted((CONFIGS / "presets").glob("*_1gpu.toml"))
]

_LORA = {"lora.rank": 16, "lora.patterns": ["*.q_proj", "*.v_proj"]}
_PICTURES = {
    "data.sources.talks.name": "forge_vlm.data.drawn:DrawnSquares",
    "data.sources.talks.path": None,
    "data.sources.talks.options": {"size": 384, "tokens": 144},
    "model.images_per_row": 1,
    "model.modalities.image.first_id": 1,
}
_MLA = {
    "model.mixer": "mla", "model.num_kv_heads": None,
    "model.mla.kv_lora_rank": 512, "model.mla.q_lora_rank": 1024, "model.mla.qk_nope_head_dim": 64,
    "model.mla.qk_rope_head_dim": 32, "model.mla.v_head_dim": 64,
}  # fmt: skip

ONE_GPU = [
    _of_1b("1b"),
    _of_1b("1b one micro-batch", train__global_batch=1),
    _of_1b("1b micro_batch 2", train__micro_batch=2, train__global_batch=4),
    _of_1b("1b micro_batch 4, one", train__micro_batch=4, train__global_batch=4),
    _of_1b("1b recompute full", parallel__recompute="full"),
    _of_1b("1b recompute selective", parallel__recompute="selective"),
    _of_1b("1b recompute full, every 2", parallel__recompute="full", parallel__recompute_every=2),
    _of_1b("1b fp32", parallel__precision="fp32"),
    _of_1b(
        "1b compile, micro_batch 4",
        parallel__compile=True,
        train__micro_batch=4,
        train__global_batch=4,
    ),
    _of_1b(
        "1b compile, memory_budget 0.5",
        parallel__compile=True,
        parallel__memory_budget=0.5,
        train__micro_batch=4,
        train__global_batch=4,
    ),
    _of_1b("1b compile, recompute full", parallel__compile=True, parallel__recompute="full"),
    _of_1b("1b compile, fp32", parallel__compile=True, parallel__precision="fp32"),
    _of_1b("1b fused loss", train__loss="fused_cross_entropy"),
    _of_1b(
        "1b fused loss, micro_batch 4",
        train__loss="fused_cross_entropy",
        train__micro_batch=4,
        train__global_batch=4,
    ),
    _of_1b("1b muon", optimizer__name="muon"),
    _of_1b("1b lion", optimizer__name="lion"),
    _of_1b(
        "1b schedule-free",
        optimizer__name="schedule_free_adamw",
        schedule__name="constant",
    ),
    _of_1b("1b average of weights", **{"optimizer.ema.decay": 0.99}),  # prose: the name of a case
    _of_1b("1b stored in bf16", parallel__param_dtype="bf16", optimizer__state_dtype="bf16"),
    _of_1b("1b float8 tensorwise", parallel__float8="tensorwise"),
    _of_1b("1b float8 rowwise", parallel__float8="rowwise"),
    _of_1b("1b float8 tensorwise, compile", parallel__float8="tensorwise", parallel__compile=True),
    _of(
        "125m",
        "cpu_offload",
        train__micro_batch=4,
        train__global_batch=8,
        parallel__cpu_offload=True,
    ),
    _of_1b("1b adapters", **_LORA),
    _of_1b("1b two tokens ahead", **{"model.mtp.num_modules": 1}),
    _of_1b(
        "1b two tokens ahead, fused loss",
        train__loss="fused_cross_entropy",
        **{"model.mtp.num_modules": 1},
    ),
    _of_1b("1b three tokens ahead", **{"model.mtp.num_modules": 2}),
    _of_1b(
        "1b three tokens ahead, fused loss",
        train__loss="fused_cross_entropy",
        **{"model.mtp.num_modules": 2},
    ),
    _of_1b("1b latent attention", **_MLA),
    _of_1b("1b untied", model__tie_embeddings=False),
    _of_1b("1b sampled", **{"sample.max_new_tokens": 8}),
    _of("moe_8", "12 layers", model__num_layers=12),
    _of("moe_8", "12 layers, compile", model__num_layers=12, parallel__compile=True),
    _of("moe_64", "8 layers", model__num_layers=8),
    _of("moe_64", "8 layers, recompute full", model__num_layers=8, parallel__recompute="full"),
    _of("qwen3_siglip2", "", **_PICTURES),
    Job(
        "125m saved in the background",  # prose: the name of a case
        "presets/125m_1gpu.toml",
        {"train.global_batch": 16, "checkpoint.every_steps": 1},
        saves=True,
    ),
]

LAYOUTS = [
    _of_1b("1b fsdp 2", 2),
    _of_1b("1b fsdp 2, gathered throughout", 2, parallel__reshard_after_forward=False),
    _of_1b("1b fsdp 2, recompute full", 2, parallel__recompute="full"),
    _of_1b("1b fsdp 2, untied", 2, model__tie_embeddings=False),
    _of_1b("1b fsdp 2, untied, recompute full", 2, model__tie_embeddings=False, parallel__recompute="full"),
    _of_1b("1b fsdp 2, untied, one micro-batch", 2, model__tie_embeddings=False, train__global_batch=2),
    _of("7b", "4 layers, fsdp 4", 4, model__num_layers=4),
    _of_1b("1b hsdp 2 x 2", 4, parallel__dp_replicate=2),
    _of_1b("1b tp 2", 2, parallel__tp=2),
    _of_1b("1b tp 2, whole sequences", 2, parallel__tp=2, parallel__sequence_parallel=False),
    _of_1b("1b cp 2", 2, parallel__cp=2),
    _of_1b("1b pp 2 gpipe", 2, parallel__pp=2, parallel__pp_schedule="gpipe"),
    _of_1b("1b pp 2 1f1b", 2, parallel__pp=2, parallel__pp_schedule="1f1b"),
    _of_1b("1b pp 2 interleaved", 2, parallel__pp=2, parallel__pp_schedule="interleaved_1f1b"),
    _of_1b("1b pp 2 interleaved zero-bubble", 2, parallel__pp=2, parallel__pp_schedule="interleaved_zero_bubble"),
    _of_1b("1b pp 2 zbv, untied", 2, model__tie_embeddings=False, parallel__pp=2, parallel__pp_schedule="zbv_zero_bubble"),
    _of_1b("1b pp 2 dualpipev, untied", 2, model__tie_embeddings=False, parallel__pp=2, parallel__pp_schedule="dualpipev"),
    _of("moe_8", "8 layers, fsdp 2", 2, model__num_layers=8),
    _of("moe_8", "8 layers, ep 2", 2, model__num_layers=8, parallel__ep=2),
]  # fmt: skip

JOBS = [*PRESETS, *ONE_GPU, *LAYOUTS]
