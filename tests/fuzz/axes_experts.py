"""Axes of mixtures of experts."""

from __future__ import annotations

from typing import Any

from tests.fuzz.job import NO, NONE, Axis, Job, table


def _experts(router: str, **keys: Any) -> Any:
    def found(job: Job) -> dict[str, Any]:
        sizes = {name: job.sizes[name] for name in ("num_experts", "top_k")}
        own = {
            "width_multiplier": job.pick("expert width", (0.5, 0.75)),
            "route_scale": job.pick("route scale", (1.0, 1.0, 2.5)),
            "router_bias": job.pick("router bias", (False, False, True)),
        }
        return table("model.moe", router=router, **sizes, **own, **keys)

    return found


def _groups(job: Job) -> dict[str, Any]:
    score = {"group_score": job.pick("group score", ("top2_sum", "max"))}
    return _experts("sigmoid_topk", num_groups=2, top_groups=1, **score)(job)


def _aux(scope: str) -> dict[str, Any]:
    return table("model.moe", aux_loss_weight=0.1, aux_scope=scope)


_BIAS = {"model.moe.bias_update_rate": 0.01}
_ALL_LOSSES = {"sequence_loss_weight": 0.05, "z_loss_weight": 0.01}
EXPERTS = {
    "experts": Axis(
        "experts",
        {
            **NONE,
            "softmax": _experts("softmax_topk"),
            "softmax of all": _experts("softmax_topk", normalize="before_top_k"),
            "sigmoid": _experts("sigmoid_topk"),
            "groups": _groups,
            "expert choice": _experts("expert_choice"),
            "uniform": _experts("uniform"),
        },
        {"none": 11.0, "uniform": 0.5},
    ),
    "router losses": Axis(
        "experts",
        {
            **NONE,
            "sequence": _aux("sequence"),
            "micro_batch": _aux("micro_batch"),
            "global_batch": _aux("global_batch"),
            "global_batch_lagged": _aux("global_batch_lagged"),
            "of sequences": {"model.moe.sequence_loss_weight": 0.1},
            "z": {"model.moe.z_loss_weight": 0.05},
            "several": {**_aux("global_batch_lagged"), **table("model.moe", **_ALL_LOSSES)},
        },
    ),
    "expert bias": Axis(
        "experts",
        {
            **NONE,
            "not updated": {"model.moe.expert_bias": True},
            "constant": _BIAS,
            "centered": {**_BIAS, "model.moe.bias_center": True},
            "cosine": {**_BIAS, "model.moe.bias_schedule": "cosine"},
            "linear_warmup": {**_BIAS, "model.moe.bias_schedule": "linear_warmup"},
        },
        {"none": 3.0},
    ),
    "capacity": Axis(
        "experts",
        {
            **NONE,
            "position": {"model.moe.capacity_factor": 1.1},
            "probability": table("model.moe", capacity_factor=1.2, drop_policy="probability"),
        },
        {"none": 4.0},
    ),
    "expert": Axis(
        "experts",
        {
            "swiglu": NO,
            "swiglu, biases": {"model.moe.bias": True},
            "gelu": {"model.moe.activation": "gelu"},
            "clamped_swiglu": table(
                "model.moe", activation="clamped_swiglu", swiglu_limit=0.5, bias=True
            ),
        },
        {"swiglu": 2.0},
    ),
    "shared experts": Axis(
        "experts",
        {
            **NONE,
            "one": lambda job: table(
                "model.moe", num_shared_experts=1, shared_hidden_dim=job.sizes["shared"]
            ),
            "two, gated": lambda job: table(
                "model.moe",
                num_shared_experts=2,
                shared_gate=True,
                shared_hidden_dim=job.sizes["shared"],
            ),
        },
    ),
    "mixture layers": Axis(
        "experts",
        {
            "all": NO,
            "every second": {"model.moe.every_n_layers": 2},
            "first dense": {"model.moe.first_dense_layers": 1},
        },
    ),
    "dispatch": Axis(
        "experts",
        {
            "plain": NO,
            "chunks": {"model.moe.dispatch_chunks": 2},
            "hierarchical": {"model.moe.dispatcher": "hierarchical"},
        },
        {"plain": 2.0},
    ),
    "expert backend": Axis(
        "experts",
        {name: {"model.moe.backend": name} for name in ("auto", "loop", "batched", "grouped_mm")},
        {"auto": 3.0, "grouped_mm": 0.5},
    ),
}
