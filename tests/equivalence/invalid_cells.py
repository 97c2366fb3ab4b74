"""Combinations that have no cell, and the key and the code with which each is rejected."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from batches import ROWS, SEQ
from torch import Tensor, nn

from forge_core import Transformer, TransformerConfig
from forge_core.model import FeedForward
from forge_data import filler_batch
from forge_moe import MoE, MoEConfig, expert_parallelize
from forge_parallel import ParallelConfig, make_meshes, parallelize
from forge_parallel.axes import shard_sequence
from forge_parallel.check_model import extra_problems
from forge_parallel.pipeline import Pipeline
from forge_testing import run_on_ranks
from forge_vlm import VLM, FusionConfig, ModalityConfig, VLMConfig

_MODEL: dict[str, Any] = {"vocab_size": 32, "dim": 32, "num_layers": 4, "num_heads": 4, "max_seq_len": SEQ}  # fmt: skip


@dataclass(frozen=True)
class Refusal:
    """Keys of ParallelConfig on `world` ranks, and of the model: TransformerConfig's, `experts` of its
    mixtures, `pictures` for a VLM of that fusion, `masks` for one where tokens of a picture see each other, `dropout` of a
    module, `foreign` for code that uses a weight of another module in the forward, or `bare` for a module that says
    nothing of itself. `problem` is the key and the code of its first problem."""

    world: int
    keys: dict[str, Any]
    problem: tuple[str, str]
    model: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 4
    seq_len: int = SEQ


_TP: dict[str, Any] = {"tp": 2}
_PP: dict[str, Any] = {"pp": 2, "pp_schedule": "1f1b"}
_BARE = {"bare": True}
_TIED = {"tie_embeddings": True}
_PICTURES = {"pictures": "joint_decoder"}
_CROSS = {"pictures": "cross_attention"}
REJECTIONS = {
    "cpu_offload x tp": Refusal(2, {"tp": 2, "cpu_offload": True}, ("cpu_offload", "excludes")),
    "cpu_offload x pp": Refusal(2, {**_PP, "cpu_offload": True}, ("cpu_offload", "excludes")),
    "cpu_offload x cp": Refusal(2, {"cp": 2, "cpu_offload": True}, ("cpu_offload", "excludes")),
    "cpu_offload x ep": Refusal(2, {"ep": 2, "cpu_offload": True}, ("cpu_offload", "excludes")),
    "tied x pp zbv": Refusal(2, {**_PP, "pp_schedule": "zbv_zero_bubble"}, ("pp_schedule", "tied"), _TIED),
    "tied x pp dualpipev": Refusal(2, {**_PP, "pp_schedule": "dualpipev"}, ("pp_schedule", "tied"), _TIED),
    "compile x pp zero bubble": Refusal(2, {**_PP, "pp_schedule": "interleaved_zero_bubble", "compile": True}, ("compile", "excludes")),
    "compile x pp zbv": Refusal(2, {**_PP, "pp_schedule": "zbv_zero_bubble", "compile": True}, ("compile", "excludes")),
    "compile x pp dualpipev": Refusal(2, {**_PP, "pp_schedule": "dualpipev", "compile": True}, ("compile", "excludes")),
    "compile x recompute selective": Refusal(2, {"compile": True, "recompute": "selective"}, ("recompute", "excludes")),
    "memory_budget without compile": Refusal(2, {"memory_budget": 0.5}, ("memory_budget", "range")),
    "float8 x fp32": Refusal(2, {"float8": "rowwise"}, ("float8", "precision")),
    "float8_all_gather on a CPU": Refusal(2, {"float8": "tensorwise", "float8_all_gather": True, "precision": "bf16"}, ("float8_all_gather", "requires")),
    "reduce_dtype bf16 x fp32": Refusal(2, {"reduce_dtype": "bf16"}, ("reduce_dtype", "precision")),
    "param_dtype bf16 x fp32": Refusal(2, {"param_dtype": "bf16"}, ("param_dtype", "precision")),
    "async_tp on a CPU": Refusal(2, {"tp": 2, "async_tp": True, "compile": True}, ("async_tp", "requires")),
    "tp x a model without roles": Refusal(2, {"tp": 2}, ("roles", "missing"), _BARE),
    "cp x a model without attend": Refusal(2, {"cp": 2}, ("attend", "missing"), _BARE),
    "pp x a model without parts": Refusal(2, _PP, ("pipeline_parts", "missing"), _BARE),
    "ep x a dense model": Refusal(2, {"ep": 2}, ("model", "missing")),
    "tp x dropout": Refusal(2, _TP, ("dropout.p", "dropout"), {"dropout": 0.1}),
    "tp x one product for gate and up": Refusal(2, _TP, ("weight", "foreign"), {"foreign": "fused"}),
    "tp x a head that is a function of the embedding": Refusal(2, _TP, ("weight", "foreign"), {"foreign": "head", "tie_embeddings": True}),
    "ep 2 x three experts": Refusal(2, {"ep": 2}, ("num_experts", "divides"), {"experts": 3}),
    "ep 4 on two ranks": Refusal(2, {"ep": 4}, ("ep", "divides"), {"experts": 4}),
    "cp 2 x rows of 14 tokens": Refusal(2, {"cp": 2}, ("seq_len", "divides"), seq_len=14),
    "pp 1f1b x one micro-batch": Refusal(2, _PP, ("num_micro_batches", "pp"), micro_batches=1),
    "pp dualpipev x two micro-batches": Refusal(2, {**_PP, "pp_schedule": "dualpipev"}, ("num_micro_batches", "stages"), micro_batches=2),
    "pp interleaved x two layers": Refusal(2, {**_PP, "pp_schedule": "interleaved_1f1b"}, ("num_layers", "stages"), {"num_layers": 2}),
    "pp zbv x one stage per rank": Refusal(2, {**_PP, "pp_schedule": "zbv_zero_bubble", "pp_stages_per_rank": 1}, ("pp_stages_per_rank", "schedule")),
    "pictures x cp x tp": Refusal(4, {"cp": 2, "tp": 2}, ("parallel.cp", "tp"), _PICTURES),
    "pictures that see themselves whole x cp": Refusal(2, {"cp": 2}, ("parallel.cp", "mask_inputs"), {**_PICTURES, "masks": "image"}),
    "cross attention x pp": Refusal(2, _PP, ("pipeline_parts", "unsupported"), _CROSS),
    "axes that are not the ranks": Refusal(2, {"tp": 2, "dp_shard": 2}, ("dp_shard", "world_size")),
}  # fmt: skip


def rejection(name: str) -> tuple[str, str, str]:
    """Key, code and text of the first problem on the refusal's ranks; empty if there is none."""
    key, code, text = run_on_ranks(REJECTIONS[name].world, first_problem, name)[0]
    return key, code, text


def first_problem(name: str) -> tuple[str, str, str]:
    """On a rank: as `rejection`."""
    try:
        _prepare(REJECTIONS[name])
    except ValueError as error:
        problem = error.problems[0]  # type: ignore[attr-defined]
        return problem.key, problem.code, str(error)
    return "", "", ""


def _prepare(asked: Refusal) -> None:
    config = ParallelConfig(**{"device": "cpu", "precision": "fp32", **asked.keys})
    meshes = make_meshes(config)
    model = _model(asked.model)
    if config.ep > 1:
        expert_parallelize(model, meshes.sparse["ep"])
    if isinstance(model, VLM):
        _take_pictures(model, config)
    parallelize(model, config, meshes, seq_len=asked.seq_len)
    if "foreign" in asked.model:
        model(torch.zeros(1, asked.seq_len, dtype=torch.int64))
    if config.pp > 1:
        sizes = {"num_micro_batches": asked.micro_batches, "micro_batch": ROWS}
        Pipeline(model, config, meshes, seq_len=asked.seq_len, dim=_MODEL["dim"], **sizes)
    shard_sequence(torch.zeros(ROWS, asked.seq_len), meshes.cp)


def _take_pictures(model: VLM, config: ParallelConfig) -> None:
    """What a runner asks before it builds: whether the model gets its pictures in this layout."""
    batch = filler_batch(ROWS, SEQ)
    masks = [] if model.config.bidirectional == "none" else ["image_ids"]
    names = [*model.extra_inputs, *masks]
    extras = {name: torch.zeros(ROWS, SEQ) for name in names}
    layout = config.axes(dist.get_world_size())
    for problem in extra_problems(model, replace(batch, extras=extras), layout):
        error = ValueError(str(problem))
        error.problems = (problem,)  # type: ignore[attr-defined]
        raise error


def _model(keys: dict[str, Any]) -> nn.Module:
    if keys.get("bare"):
        return nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32))
    if "pictures" in keys:
        return _with_pictures(keys)
    own = ("experts", "dropout", "foreign")
    config = TransformerConfig(**{**_MODEL, **{k: v for k, v in keys.items() if k not in own}})
    if keys.get("foreign") == "head":
        return _FunctionalHead(config)
    if keys.get("foreign") == "fused":
        return Transformer(config, feed_forward=lambda _: _Fused(config.dim, 64))
    if "dropout" in keys:
        model = Transformer(config)
        model.dropout = nn.Dropout(keys["dropout"])
        return model
    if "experts" not in keys:
        return Transformer(config)
    mixture = MoEConfig(dim=config.dim, hidden_dim=8, num_experts=keys["experts"])
    return Transformer(config, feed_forward=lambda _: MoE(mixture))


def _with_pictures(keys: dict[str, Any]) -> VLM:
    """A VLM of a fusion, whose pictures' tokens may see each other."""
    return VLM(
        VLMConfig(
            **_MODEL,
            modalities={"image": ModalityConfig(31)},
            fusion=FusionConfig(keys["pictures"]),
            bidirectional=keys.get("masks", "none"),
        )
    )


class _Fused(FeedForward):
    """Multiplies by the weights of two of its modules at once."""

    def forward(self, x: Tensor, ctx: Any = None) -> Tensor:
        gate, up = F.linear(x, torch.cat([self.gate_proj.weight, self.up_proj.weight])).chunk(2, -1)
        down: Tensor = self.down_proj(F.silu(gate) * up)
        return down


class _FunctionalHead(Transformer):
    """Multiplies by the embedding's weight itself."""

    def project(self, hidden: Tensor, loss: Any = None) -> Tensor:
        return F.linear(hidden, self.embedding.weight)
