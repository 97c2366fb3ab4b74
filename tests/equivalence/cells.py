"""The cells: every layout and feature that must equal one process, and how near."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from forge_core import AttentionSpec, RopeScaling
from forge_core.model import LayerType, MLAConfig
from forge_parallel import ParallelConfig
from forge_parallel.compute import divide_batch

# Worst of the quantities against the same cell on one rank.
ONE_RANK_BF16 = "one rank bf16"
# Of mixtures: how often each expert was chosen, which must be the same numbers.
ROUTES = "routes"
QUANTITIES = ("loss", "gradients", "norm", "weights")
# Error of a tensor is max|a - b| / max|b|.
#
# fp32: both sides compute the same sums in another order. The largest have some hundred terms, the
# rounding unit is 6e-8.
FP32_BOUND = 1e-5
# bf16 against the fp32 reference. The rounding unit is 2^-9 = 2e-3. An entry of a gradient passes some
# twenty roundings in a row (two blocks and the head, forward and backward), which add up like a random
# walk: sqrt(20) 2e-3 = 9e-3, and the worst of some thousand entries is four to five times that. Loss and
# norm are sums over many tokens and entries, where most of it cancels. A weight moves by about a
# hundredth of its size in the three updates; where the sign of its gradient is uncertain, so is that.
BF16_BOUNDS = {"loss": 2e-3, "gradients": 5e-2, "norm": 5e-3, "weights": 2e-2}
# With weights in bf16 as well each is rounded once more, at the beginning and in each update, by up to 2^-8, and so
# are the gradients of each micro-batch; an entry that is a difference of such numbers has several times that.
BF16_WEIGHTS_BOUNDS = {"loss": 2e-3, "gradients": 0.15, "norm": 1e-2, "weights": 4e-2}
# The gradient of an encoder has passed as many roundings again, and comes as differences through the keys and values of
# few tokens; its biases begin at 0, so that after three updates they are nothing but such gradients.
BF16_PICTURES_BOUNDS = {**BF16_BOUNDS, "gradients": 0.15, "weights": 0.1}
# TF32 against the fp32 reference: a product's factors are rounded to eleven bits as it begins, 2^-11 where bf16's are
# 2^-9; sums, and what lies between products, stay in fp32. So the same walks, a quarter as wide.
TF32_BOUNDS = {name: bound / 4 for name, bound in BF16_BOUNDS.items()}
TF32_PICTURES_BOUNDS = {name: bound / 4 for name, bound in BF16_PICTURES_BOUNDS.items()}
# bf16 on many ranks against bf16 on one: the same roundings, summed over micro-batches in fp32 on both
# sides. What is left: a weight that differs in its last fp32 bit may round to the other bf16 number, which
# changes a sum of 32 or more products by one part in 2^8 of one of them, 1e-4.
BF16_ONE_RANK_BOUND = 1e-3


@dataclass(frozen=True)
class Layout:
    """Ranks and the keys of ParallelConfig that arrange them.

    `micro_batches` are what a schedule needs at least, `layers` its stages.
    """

    world: int
    keys: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    layers: int = 2

    @property
    def sizes(self) -> Any:
        return ParallelConfig(device="cpu", **self.keys).axes(self.world)

    @property
    def readers(self) -> int:
        """Ranks that read different data."""
        return self.sizes.batch_size

    @property
    def axes(self) -> frozenset[str]:
        """What is spread, and how: names of axes above 1, the schedule, the exchange."""
        sizes = self.sizes._asdict()
        found = {name for name, size in sizes.items() if size > 1}
        if "tp" in found and not self.keys.get("sequence_parallel", True):
            found = found - {"tp"} | {"tp, whole sequences"}
        if "cp" in found:
            found = found - {"cp"} | {f"cp {self.keys.get('cp_exchange', 'all_gather')}"}
        if "pp" in found:
            found = found - {"pp"} | {f"pp {self.keys['pp_schedule']}"}
        return frozenset(found)


@dataclass(frozen=True)
class Feature:
    """What a cell does beside training. Fields that are left alone are those of plain fp32 training.

    labels names a rule of `batches.py`; parallel, model and moe are keys of ParallelConfig,
    TransformerConfig and MoEConfig (every second layer is then a mixture); padded means that the last row of
    the second step is the last of an epoch, with pads behind its tokens; evaluated, that the loss of whole
    rows in eval mode is compared after the updates; branches, that a micro-batch takes one of two
    feed-forwards, as its first token says; swaps, that between steps other weights are put in for an
    evaluation, and the own ones back; total, that a step has so many micro-batches in all, dealt to the
    readers whether they divide or not, with filler where one has fewer; deferred means that nothing is
    summed over ranks before the last micro-batch (FSDP2's `set_requires_gradient_sync`), instead of what
    forge_parallel's `accumulate` does; fused, that the head computes the loss without all logits; terms are
    coefficients of the loss (z_loss, label_smoothing); lora are keys of
    LoRAConfig, of adapters over a frozen base in bf16; ahead are modules that predict further tokens (MTP); images names the
    fusion of a model whose tokens 40 to 69 are those of images, pictures that of one with an encoder (the first micro-batch of
    the last reader has none); backend is the compiler's; first_seed is added to the seed of a run.
    """

    micro_batches: int = 1
    labels: str = "uneven"
    packed: bool = False
    padded: bool = False
    evaluated: bool = False
    branches: bool = False
    swaps: bool = False
    total: int | None = None
    deferred: bool = False
    fused: bool = False
    terms: dict[str, float] = field(default_factory=dict)
    parallel: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    moe: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)
    ahead: int = 0
    images: str | None = None
    pictures: str | None = None
    backend: str = "aot_eager"
    first_seed: int = 0

    @property
    def bf16(self) -> bool:
        return self.parallel.get("precision") == "bf16"

    @property
    def only_on_cpus(self) -> str:
        """Why it has no cell on GPUs; empty if it has."""
        if self.moe.get("backend") == "grouped_mm" and not self.bf16:
            return "grouped_mm takes fp32 on CPUs only"
        return ""

    @property
    def places(self) -> int:
        """Tokens that stand for a picture: where it is in the row, as many as it has features."""
        return 1 if self.pictures == "cross_attention" else 4


@dataclass(frozen=True)
class Cell:
    """One row of the table."""

    layout: str
    feature: str
    optimizer: str
    seed: int = 0
    tf32: bool = False  # of the candidate's products, on a GPU

    @property
    def name(self) -> str:
        return f"{self.layout}/{self.feature}/{self.optimizer}"

    @cached_property
    def parts(self) -> frozenset[Any]:
        """What occurs in it: each axis and all of them together, its feature and optimizer."""
        axes = LAYOUTS[self.layout].axes
        return axes | {axes, self.feature, self.optimizer}

    @property
    def micro_batches(self) -> int:
        """Of each data rank and step, filler included."""
        total, layout = FEATURES[self.feature].total, LAYOUTS[self.layout]
        if total is not None:
            config = ParallelConfig(device="cpu", **layout.keys)
            return divide_batch(config, total, layout.readers, micro_batch=1).count
        return max(LAYOUTS[self.layout].micro_batches, FEATURES[self.feature].micro_batches)

    @property
    def bounds(self) -> dict[str, float]:
        """Of each quantity; bf16 on many ranks is also compared with bf16 on one."""
        feature, layout = FEATURES[self.feature], LAYOUTS[self.layout]
        bounds = dict.fromkeys(QUANTITIES, FP32_BOUND)
        if self.tf32:
            bounds = dict(TF32_PICTURES_BOUNDS if feature.pictures else TF32_BOUNDS)
        if feature.bf16:
            stored = feature.parallel.get("param_dtype") == "bf16"
            bounds = dict(BF16_WEIGHTS_BOUNDS if stored else BF16_BOUNDS)
            bounds = dict(BF16_PICTURES_BOUNDS) if feature.pictures else bounds
            # Other sums are rounded: those of gradients over ranks; with tp those inside of layers; with cp
            # and ep products over other tokens, whose weight gradients are rounded before they are summed.
            sizes = layout.sizes
            rounded = feature.parallel.get("reduce_dtype") == "bf16"
            rounded |= max(sizes.tp, sizes.cp, sizes.ep) > 1
            # gradients in bf16: sums over micro-batches of a rank are rounded, those over ranks are not
            rounded |= stored and sizes.pp == 1
            if layout.world > 1:
                bounds[ONE_RANK_BF16] = max(bounds.values()) if rounded else BF16_ONE_RANK_BOUND
        return bounds | ({ROUTES: 0.0} if feature.moe else {})


def _pipe(world: int, schedule: str, micro_batches: int = 2, **keys: Any) -> Layout:
    """Two pipeline ranks; four layers, as many stages as the interleaved schedules make."""
    return Layout(world, {"pp": 2, "pp_schedule": schedule, **keys}, micro_batches, layers=4)


_TP: dict[str, Any] = {"tp": 2}
_WHOLE = {**_TP, "sequence_parallel": False}
_CP: dict[str, Any] = {"cp": 2}
_RING = {**_CP, "cp_exchange": "ring"}
_ZERO_BUBBLE = "interleaved_zero_bubble"
LAYOUTS = {
    "one_rank": Layout(1),
    "fsdp_2": Layout(2),
    "fsdp_4": Layout(4),
    "fsdp_3": Layout(3),
    "fsdp_5": Layout(5),
    "fsdp_6": Layout(6),
    "fsdp_7": Layout(7),
    "hsdp_2x2": Layout(4, {"dp_replicate": 2}),
    "tp": Layout(2, _TP),
    "tp_whole": Layout(2, _WHOLE),
    "cp": Layout(2, _CP),
    "cp_ring": Layout(2, _RING),
    "pp_gpipe": _pipe(2, "gpipe"),
    "pp_1f1b": _pipe(2, "1f1b"),
    "pp_interleaved": _pipe(2, "interleaved_1f1b"),
    "pp_zero_bubble": _pipe(2, _ZERO_BUBBLE),
    "pp_zbv": _pipe(2, "zbv_zero_bubble"),
    "pp_dualpipev": _pipe(2, "dualpipev", 4),
    "ep": Layout(2, {"ep": 2}),
    # two axes
    "fsdp_tp": Layout(4, _TP),
    "fsdp_tp_whole": Layout(4, _WHOLE),
    "hsdp_tp": Layout(4, {**_TP, "dp_replicate": 2}),
    "fsdp_cp": Layout(4, _CP),
    "hsdp_cp_ring": Layout(4, {**_RING, "dp_replicate": 2}),
    "fsdp_pp_gpipe": _pipe(4, "gpipe"),
    "fsdp_pp_1f1b": _pipe(4, "1f1b"),
    "fsdp_pp_interleaved": _pipe(4, "interleaved_1f1b"),
    "fsdp_pp_zero_bubble": _pipe(4, _ZERO_BUBBLE),
    "fsdp_pp_zbv": _pipe(4, "zbv_zero_bubble"),
    "fsdp_pp_dualpipev": _pipe(4, "dualpipev", 4),
    "hsdp_pp": _pipe(4, "1f1b", dp_replicate=2),
    "efsdp_ep": Layout(4, {"ep": 2}),
    "hsdp_ep": Layout(4, {"ep": 2, "dp_replicate": 2}),
    "tp_cp": Layout(4, {**_TP, **_CP}),
    "tp_whole_cp_ring": Layout(4, {**_WHOLE, **_RING}),
    "tp_pp": _pipe(4, "1f1b", **_TP),
    "tp_pp_zbv": _pipe(4, "zbv_zero_bubble", **_TP),
    "tp_dp3": Layout(6, _TP),
    "tp4": Layout(4, {"tp": 4}),
    "hsdp_tp_dp3": Layout(12, {**_TP, "dp_replicate": 2}),
    "tp_pp_dp3": _pipe(12, "1f1b", **_TP),
    "pp_dp3": _pipe(6, "1f1b"),
    "pp_interleaved_dp3": _pipe(6, "interleaved_1f1b"),
    "tp_whole_pp": _pipe(4, "interleaved_1f1b", **_WHOLE),
    "cp_pp": _pipe(4, "1f1b", **_CP),
    "cp_ring_pp": _pipe(4, _ZERO_BUBBLE, **_RING),
    "tp_ep": Layout(2, {**_TP, "ep": 2}),
    "tp_whole_ep": Layout(2, {**_WHOLE, "ep": 2}),
    "cp_ep": Layout(2, {**_CP, "ep": 2}),
    # three and more
    "fsdp_tp_ep2": Layout(4, {**_TP, "ep": 2}),
    "fsdp_tp_ep4": Layout(4, {**_TP, "ep": 4}),
    "tp_cp_ep": Layout(4, {**_TP, **_CP, "ep": 4}),
    "pp_ep": _pipe(4, "1f1b", ep=2),
    "pp_ep_zero_bubble": _pipe(4, _ZERO_BUBBLE, ep=2),
    "pp_ep_dualpipev": _pipe(4, "dualpipev", 4, ep=2),
    "tp_pp_ep": _pipe(4, "interleaved_1f1b", **_TP, ep=2),
    "fsdp_tp_cp": Layout(8, {**_TP, **_CP}),
    "fsdp_tp_pp": _pipe(8, "1f1b", **_TP),
    "fsdp_tp_pp_interleaved": _pipe(8, "interleaved_1f1b", **_TP),
    "hsdp_tp_pp": _pipe(8, "1f1b", **_TP, dp_replicate=2),
    "fsdp_cp_pp": _pipe(8, "1f1b", **_CP),
    "tp_cp_pp": _pipe(8, "zbv_zero_bubble", **_TP, **_CP),
    "pp_ep_fsdp": _pipe(8, "1f1b", ep=2),
    "fsdp_tp_pp_ep": _pipe(8, "1f1b", **_TP, ep=4),
    "hsdp_tp_ep": Layout(8, {**_TP, "dp_replicate": 2, "ep": 2}),
}
_BF16 = {"precision": "bf16"}
_BF16_WEIGHTS = {**_BF16, "param_dtype": "bf16"}
_SOFTMAX = {"aux_loss_weight": 0.02, "z_loss_weight": 0.01, "shared_gate": True}
_SIGMOID = {"router": "sigmoid_topk", "bias_update_rate": 0.01, "sequence_loss_weight": 0.02}
_GLOBAL = {"aux_loss_weight": 0.02, "aux_scope": "global_batch"}
_LAGGED = {"aux_loss_weight": 0.02, "aux_scope": "global_batch_lagged"}
_FULL = {"recompute": "full"}
_SELECTIVE = {"recompute": "selective"}
_TERMS = {"z_loss": 0.01, "label_smoothing": 0.1}
_EVEN = {"vocab_size": 102}  # over tp 2 and three shards
# over tp 2 and 3 or 4 shards FSDP2 cuts such tables by width, which 3 must divide
_ODD = {"vocab_size": 121, "dim": 48}
_CAPPED = {**_ODD, "logits_scale": 1.5, "logits_softcap": 2.0}
_LORA = {"patterns": ("*_proj",), "rank": 3, "alpha": 6.0}
_COMPILE = {"compile": True}
_WIDTHS = {"kv_lora_rank": 12, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 8}
_YARN = RopeScaling(
    4.0, name="yarn", original_max_position=8, mscale=0.7, mscale_all_dim=0.5, truncate=False
)
_MLA = {
    "mixer": "mla",
    "mla": MLAConfig(q_lora_rank=20, rope_interleave=True, **_WIDTHS),
    "num_kv_heads": None,
    "qkv_bias": True,
    "rope_scaling": _YARN,
}
_CLAMPED = {
    **{"activation": "clamped_swiglu", "swiglu_limit": 0.05, "bias": True, "router_bias": True},
    **{"num_shared_experts": 0, "aux_loss_weight": 0.02},
}
_LOCAL = {
    "layer_pattern": ("local", "global"),
    "layer_types": {"local": LayerType(window=5)},
}
_GPT_OSS = {
    "attention": AttentionSpec(sinks=True),
    **_LOCAL,
    "qkv_bias": True,
    "o_bias": True,
}
_MLA_PLAIN = {"mixer": "mla", "mla": MLAConfig(**_WIDTHS), "num_kv_heads": None}
# as OLMo 2, Gemma 3 and Granite have them, with layers of two types
_POST_NORM = {"block": "post_norm", "feed_forward": "relu2"}
_SANDWICH = {"block": "sandwich", "norm": "rms_norm_plus_one", "qk_norm": True, "tie_embeddings": True,
             "feed_forward": "geglu_tanh", "embedding_scale": 5.7, "logits_softcap": 2.0}  # fmt: skip
_MULTIPLIERS = {"embedding_scale": 4.0, "residual_scale": 0.3, "logits_scale": 0.2,
                "attention": AttentionSpec(scale=0.2), "layer_pattern": ("nope", "global"),
                "layer_types": {"nope": LayerType(rope=False)}}  # fmt: skip
FEATURES = {
    "plain": Feature(labels="all"),
    "accumulation": Feature(micro_batches=3),
    "accumulation_deferred": Feature(micro_batches=3, deferred=True),
    "uneven_labels": Feature(),
    "no_labels_on_a_rank": Feature(labels="none_on_last_rank"),
    "no_labels_in_a_micro_batch": Feature(micro_batches=2, labels="none_in_a_micro_batch"),
    "no_labels_in_the_batch": Feature(labels="none_in_second_step"),
    "packed": Feature(micro_batches=2, packed=True),
    "tied_embeddings": Feature(model={"tie_embeddings": True}),
    "qk_norm": Feature(model={"qk_norm": True}),
    "one_key_head": Feature(model={"num_kv_heads": 1, "qk_norm": True, "qkv_bias": True}),
    "partial_rotary": Feature(model={"partial_rotary_factor": 0.5}),
    "partial_rotary_compile": Feature(model={"partial_rotary_factor": 0.5}, parallel=_COMPILE),
    "norm_over_heads": Feature(packed=True, model={"qk_norm": True, "qk_norm_over": "all_heads"}),
    "no_reshard": Feature(parallel={"reshard_after_forward": False}),
    "cpu_offload": Feature(micro_batches=2, parallel={"cpu_offload": True}),
    "bf16": Feature(micro_batches=2, parallel=_BF16),
    "bf16_deferred": Feature(micro_batches=2, deferred=True, parallel=_BF16),
    "bf16_packed": Feature(micro_batches=2, packed=True, parallel=_BF16),
    "bf16_reduce": Feature(micro_batches=2, parallel={**_BF16, "reduce_dtype": "bf16"}),
    "bf16_cpu_offload": Feature(micro_batches=2, parallel={**_BF16, "cpu_offload": True}),
    "branches": Feature(micro_batches=2, branches=True),
    "bf16_branches": Feature(micro_batches=2, branches=True, parallel=_BF16),
    "swapped": Feature(swaps=True),
    "bf16_swapped": Feature(swaps=True, parallel=_BF16),
    "recompute_full": Feature(parallel=_FULL),
    "recompute_selective": Feature(parallel={"recompute": "selective"}),
    "recompute_every_2": Feature(parallel={**_FULL, "recompute_every": 2}),
    "compile": Feature(parallel=_COMPILE),
    "compile_recompute": Feature(parallel={**_COMPILE, **_FULL}),
    "inductor": Feature(parallel=_COMPILE, backend="inductor"),
    "packed_recompute": Feature(packed=True, model={"qk_norm": True}, parallel=_FULL),
    "moe": Feature(moe=_SOFTMAX),
    "moe_bias": Feature(micro_batches=2, moe=_SIGMOID),
    "moe_packed": Feature(micro_batches=2, packed=True, moe=_SIGMOID),
    "moe_global": Feature(micro_batches=2, moe=_GLOBAL),
    "moe_lagged": Feature(micro_batches=2, moe=_LAGGED),
    "moe_recompute": Feature(micro_batches=2, moe=_SIGMOID, parallel=_FULL),
    "moe_selective": Feature(moe={**_SOFTMAX, **_GLOBAL}, parallel={"recompute": "selective"}),
    # what leaves rows of a product without an expert, or adds to it, where products are kept
    "moe_padded": Feature(packed=True, padded=True, moe=_SIGMOID, parallel=_SELECTIVE),
    "moe_capacity": Feature(
        evaluated=True, moe={**_SOFTMAX, "capacity_factor": 0.75}, parallel=_SELECTIVE
    ),
    "moe_expert_choice": Feature(
        packed=True,
        padded=True,
        evaluated=True,
        moe={"router": "expert_choice", "z_loss_weight": 0.01},
        parallel=_SELECTIVE,
    ),
    "moe_expert_biases": Feature(moe={**_SOFTMAX, "bias": True}, parallel=_SELECTIVE),
    "moe_compile": Feature(moe=_SOFTMAX, parallel=_COMPILE),
    "moe_compile_recompute": Feature(moe=_SOFTMAX, parallel={**_COMPILE, **_FULL}),
    "moe_bf16": Feature(moe=_SIGMOID, parallel=_BF16),
    # 16 rows in micro-batches of two, for readers that do not divide them
    "dealt": Feature(total=8, model=_EVEN),
    "dealt_packed": Feature(total=8, packed=True, model=_EVEN),
    "dealt_moe": Feature(total=8, packed=True, moe=_SIGMOID, model=_EVEN),
    "dealt_moe_lagged": Feature(total=8, packed=True, moe=_LAGGED, model=_EVEN),
    "dealt_moe_capacity": Feature(
        total=8, packed=True, moe={**_SOFTMAX, "capacity_factor": 0.75}, model=_EVEN
    ),
    "dealt_bf16": Feature(total=8, packed=True, parallel=_BF16),
    "fused": Feature(micro_batches=2, packed=True, fused=True, model={"tie_embeddings": True}),
    "loss_terms": Feature(micro_batches=2, packed=True, terms=_TERMS, model=_ODD),
    "fused_terms": Feature(micro_batches=2, packed=True, fused=True, terms=_TERMS, model=_CAPPED),
    "fused_compile_recompute": Feature(fused=True, parallel={**_COMPILE, **_FULL}),
    "fused_bf16": Feature(micro_batches=2, fused=True, parallel=_BF16),
    "lora": Feature(micro_batches=2, packed=True, model={"qkv_bias": True}, lora=_LORA),
    "lora_bf16": Feature(micro_batches=2, lora=_LORA, parallel=_BF16),
    "lora_one_key_head": Feature(model={"num_kv_heads": 1, "qkv_bias": True}, lora=_LORA),
    "mla": Feature(micro_batches=2, model=_MLA),
    "mla_packed": Feature(micro_batches=2, packed=True, model=_MLA),
    "mla_plain_queries": Feature(model=_MLA_PLAIN),
    # biases begin at 0, so rounding would be measured by three updates
    "mla_bf16": Feature(model={**_MLA, "qkv_bias": False}, parallel=_BF16),
    "mla_compile": Feature(model=_MLA, parallel={**_COMPILE, **_FULL}),
    "mla_moe": Feature(packed=True, model=_MLA, moe=_SIGMOID, parallel=_SELECTIVE),
    "post_norm": Feature(micro_batches=2, packed=True, model=_POST_NORM),
    "post_norm_compile": Feature(model=_POST_NORM, parallel={**_COMPILE, **_FULL}),
    "sandwich": Feature(packed=True, model=_SANDWICH),
    "multipliers": Feature(micro_batches=2, fused=True, model=_MULTIPLIERS),
    "multipliers_packed": Feature(packed=True, model=_MULTIPLIERS),
    "moe_clamped": Feature(micro_batches=2, moe=_CLAMPED, parallel=_SELECTIVE),
    # with seeds 0 and 3, one weight of hsdp_tp differs by 1.8e-5: its gradient is a difference of large terms
    "gpt_oss": Feature(packed=True, model=_GPT_OSS, moe=_CLAMPED, first_seed=1),
    "mtp": Feature(micro_batches=2, packed=True, ahead=2),
    "mtp_tied_fused": Feature(ahead=1, fused=True, model={"tie_embeddings": True}),
    "mtp_uneven": Feature(micro_batches=2, labels="none_in_a_micro_batch", ahead=1),
    "odd_vocab": Feature(micro_batches=2, model=_ODD),
    "odd_vocab_tied": Feature(model={**_ODD, "tie_embeddings": True}),
    "odd_vocab_bf16": Feature(micro_batches=2, model=_ODD, parallel=_BF16),
    # a reader that has nothing but filler, and experts that get no row from it
    "idle": Feature(total=3),
    "idle_compile": Feature(total=3, parallel=_COMPILE),
    **{
        f"idle_moe_{backend}": Feature(
            total=3, packed=True, moe={**_SIGMOID, "backend": backend}, parallel=_SELECTIVE
        )
        for backend in ("grouped_mm", "loop", "batched")
    },
    "idle_moe_choice": Feature(
        total=3,
        packed=True,
        moe={"router": "expert_choice", "z_loss_weight": 0.01},
        parallel=_SELECTIVE,
    ),
    # weights in bf16, too, which updates round stochastically
    "bf16_weights": Feature(micro_batches=2, parallel=_BF16_WEIGHTS),
    "moe_bf16_weights": Feature(moe=_SIGMOID, parallel=_BF16_WEIGHTS),
    "window": Feature(micro_batches=2, packed=True, model={"attention": AttentionSpec(window=5)}),
    "local_layers": Feature(model=_LOCAL),
    "lora_mla": Feature(model=_MLA_PLAIN, lora=_LORA | {"patterns": ("*_proj", "!*.kv_b_proj")}),
    # towers and groups of experts for the tokens of each modality, which stand in any order; in bf16 these routers
    # choose otherwise than in fp32 here and there, and only margins of forge_moe's are watched
    "towers": Feature(micro_batches=2, packed=True, images="mixture_of_transformers"),
    "towers_recompute": Feature(images="mixture_of_transformers", parallel=_FULL),
    "towers_compile": Feature(images="mixture_of_transformers", parallel=_COMPILE),
    "towers_bf16": Feature(images="mixture_of_transformers", parallel=_BF16),
    "image_experts": Feature(micro_batches=2, packed=True, images="moma"),
    "image_experts_recompute": Feature(images="moma", parallel=_FULL),
    # pictures through an encoder, and text alone on a reader
    "pictures": Feature(micro_batches=2, packed=True, pictures="joint_decoder"),
    "pictures_recompute": Feature(pictures="joint_decoder", parallel=_FULL),
    "pictures_compile": Feature(pictures="joint_decoder", parallel=_COMPILE),
    "pictures_bf16": Feature(pictures="joint_decoder", parallel=_BF16),
    "cross": Feature(micro_batches=2, packed=True, pictures="cross_attention"),
    "cross_recompute": Feature(pictures="cross_attention", parallel=_FULL),
    "picture_towers": Feature(micro_batches=2, packed=True, pictures="mixture_of_transformers"),
    "picture_experts": Feature(micro_batches=2, packed=True, pictures="moma"),
}
OPTIMIZERS = ("sgd", "adamw")
# Optimizers that treat matrices or shards in a way of their own, in layouts that cut them in all ways.
BY_NAME = {
    "muon": {
        "one_rank": "bf16",
        "fsdp_2": "packed moe",
        "fsdp_3": "dealt_packed",
        "fsdp_4": "tied_embeddings",
        "hsdp_2x2": "packed cpu_offload",
        "tp": "packed moe",
        "tp4": "qk_norm",
        "tp_whole": "packed",
        "cp": "packed",
        "pp_1f1b": "tied_embeddings moe",
        "pp_zbv": "packed",
        "ep": "moe_bias moe_expert_biases",
        "fsdp_tp": "packed moe",
        "hsdp_tp": "accumulation",
        "efsdp_ep": "moe",
        "hsdp_ep": "moe_bias",
        "tp_ep": "moe",
        "fsdp_tp_pp": "packed",
        "fsdp_tp_pp_ep": "moe_bias",
        "hsdp_tp_ep": "moe",
    },
    "lion": {
        "fsdp_2": "packed",
        "hsdp_2x2": "cpu_offload",
        "fsdp_tp": "packed",
        "pp_1f1b": "tied_embeddings",
        "efsdp_ep": "moe",
    },
    # trained at other weights than those that are evaluated, in each step, and compared at the end
    "schedule_free": {
        "one_rank": "bf16",
        "fsdp_2": "packed",
        "fsdp_tp": "packed",
        "pp_1f1b": "tied_embeddings",
        "efsdp_ep": "moe",
    },
    "ema": {
        "one_rank": "bf16",
        "fsdp_2": "packed bf16",
        "hsdp_2x2": "cpu_offload",
        "tp": "qk_norm",
        "pp_1f1b": "tied_embeddings",
        "efsdp_ep": "moe",
    },
    # AdamW with its moments in bf16
    "adamw_bf16": {
        "one_rank": "bf16_weights",
        "fsdp_2": "bf16 bf16_weights",
        "fsdp_3": "bf16_weights",
        "hsdp_2x2": "bf16_weights",
        "tp": "bf16_weights",
        "pp_1f1b": "bf16_weights",
        "ep": "moe_bf16_weights",
        "fsdp_tp": "bf16_weights",
    },
}
AVERAGING = ("schedule_free", "ema")
# With both optimizers, in any of these layouts.
_DATA_LAYOUTS = ("fsdp_2", "fsdp_4", "hsdp_2x2")
_ON_ONE_RANK = (
    "cpu_offload",
    "bf16",
    "bf16_deferred",
    "bf16_packed",
    "bf16_cpu_offload",
    "bf16_swapped",
)
_DATA_FEATURES = tuple(FEATURES)[: tuple(FEATURES).index("recompute_full")]
_MODES = "recompute_full recompute_selective recompute_every_2 compile"
# The rest: chosen so that every pair of axes, and of an axis and a feature, that is allowed occurs.
_CHOSEN = {
    "one_rank": "moe_padded moe_capacity moe_expert_choice moe_expert_biases",
    "fsdp_2": f"{_MODES} compile_recompute inductor moe moe_bias moe_global moe_bf16 moe_padded moe_capacity"
    " moe_expert_choice moe_expert_biases fused_compile_recompute fused fused_bf16 lora lora_bf16 post_norm post_norm_compile sandwich multipliers loss_terms fused_terms mtp mtp_tied_fused window",
    "fsdp_4": "packed_recompute moe_packed moe_lagged idle idle_compile idle_moe_loop",
    "fsdp_3": "dealt dealt_packed dealt_moe dealt_moe_lagged dealt_moe_capacity dealt_bf16",
    "fsdp_5": "dealt_packed dealt dealt_moe dealt_moe_capacity",
    "fsdp_6": "dealt dealt_moe",
    "fsdp_7": "dealt_packed dealt_moe_lagged dealt_moe",
    "tp_dp3": "dealt_packed dealt_moe odd_vocab odd_vocab_tied odd_vocab_bf16",
    "hsdp_tp_dp3": "odd_vocab_tied",
    "tp_pp_dp3": "odd_vocab odd_vocab_tied",
    "tp4": "packed qk_norm one_key_head bf16 lora_one_key_head lora norm_over_heads gpt_oss",
    "pp_dp3": "dealt_packed dealt_moe dealt",
    "pp_interleaved_dp3": "dealt_packed",
    "hsdp_2x2": "recompute_selective recompute_every_2 compile moe_bias moe_recompute",
    "tp": f"accumulation packed tied_embeddings qk_norm no_labels_in_the_batch {_MODES} inductor bf16 moe moe_bias"
    " moe_recompute one_key_head partial_rotary lora lora_one_key_head post_norm post_norm_compile sandwich multipliers_packed fused fused_bf16 fused_terms loss_terms multipliers mtp mtp_tied_fused window lora_mla norm_over_heads gpt_oss",
    "tp_whole": "packed tied_embeddings qk_norm recompute_full compile moe moe_packed swapped one_key_head lora post_norm sandwich fused loss_terms mtp lora_mla norm_over_heads",
    "cp": f"accumulation packed tied_embeddings qk_norm no_labels_in_a_micro_batch {_MODES} inductor bf16 moe_bias moe_packed"
    " fused fused_compile_recompute partial_rotary norm_over_heads lora post_norm sandwich multipliers fused_terms mtp mtp_uneven window local_layers",
    "cp_ring": "packed qk_norm recompute_selective compile bf16 moe moe_global partial_rotary mtp_tied_fused window local_layers",
    "pp_gpipe": "accumulation packed tied_embeddings compile moe",
    "pp_1f1b": f"accumulation packed tied_embeddings qk_norm no_labels_in_the_batch {_MODES} inductor bf16 moe"
    " moe_bias moe_packed moe_global moe_recompute swapped fused norm_over_heads lora post_norm sandwich multipliers loss_terms mtp mtp_tied_fused window lora_mla",
    "pp_interleaved": "packed tied_embeddings recompute_full compile moe_bias mtp",
    "pp_zero_bubble": "packed tied_embeddings qk_norm recompute_full bf16 moe_recompute fused lora fused_terms",
    "pp_zbv": "packed recompute_selective moe_bias moe_selective fused_bf16",
    "pp_dualpipev": "packed qk_norm recompute_full moe moe_recompute",
    "ep": "moe moe_bias moe_packed moe_global moe_lagged moe_recompute moe_selective moe_compile"
    " moe_compile_recompute moe_padded moe_capacity moe_expert_choice",
    "fsdp_tp": "accumulation packed tied_embeddings qk_norm recompute_selective compile bf16 moe moe_bias one_key_head lora_bf16 sandwich fused fused_terms mtp_uneven norm_over_heads gpt_oss",
    "fsdp_tp_whole": "packed_recompute moe_bias branches",
    "hsdp_tp": "qk_norm accumulation moe_packed gpt_oss",
    "fsdp_cp": "accumulation packed tied_embeddings moe_bias fused window",
    "hsdp_cp_ring": "packed accumulation window",
    "fsdp_pp_gpipe": "tied_embeddings moe",
    "fsdp_pp_1f1b": "accumulation packed tied_embeddings bf16 moe_bias compile branches",
    "fsdp_pp_interleaved": "packed tied_embeddings moe_recompute",
    "fsdp_pp_zero_bubble": "tied_embeddings packed_recompute moe_bias",
    "fsdp_pp_zbv": "accumulation recompute_selective moe",
    "fsdp_pp_dualpipev": "packed moe_recompute",
    "hsdp_pp": "accumulation tied_embeddings recompute_full moe bf16_branches",
    "efsdp_ep": "moe moe_bias moe_global moe_recompute idle_moe_grouped_mm idle_moe_loop idle_moe_batched"
    " idle_moe_choice",
    "hsdp_ep": "moe_bias moe_packed idle_moe_grouped_mm",
    "tp_cp": "packed qk_norm tied_embeddings recompute_full moe_packed fused_terms window norm_over_heads",
    "tp_whole_cp_ring": "packed qk_norm moe",
    "tp_pp": "packed tied_embeddings qk_norm recompute_full compile moe_bias partial_rotary lora mtp norm_over_heads gpt_oss",
    "tp_pp_zbv": "qk_norm moe",
    "tp_whole_pp": "tied_embeddings packed moe",
    "cp_pp": "packed tied_embeddings recompute_selective moe_packed mtp local_layers",
    "cp_ring_pp": "packed moe_bias local_layers",
    "tp_ep": "moe moe_bias moe_packed moe_recompute gpt_oss",
    "tp_whole_ep": "moe moe_bias",
    "cp_ep": "moe_bias moe_packed moe_global",
    "fsdp_tp_ep2": "moe moe_bias",
    "fsdp_tp_ep4": "moe moe_bias moe_recompute",
    "tp_cp_ep": "moe_packed moe_global",
    "pp_ep": "moe moe_bias moe_packed",
    "pp_ep_zero_bubble": "moe_bias moe_recompute",
    "pp_ep_dualpipev": "moe",
    "tp_pp_ep": "moe_bias",
    "fsdp_tp_cp": "packed moe_packed odd_vocab window",
    "fsdp_tp_pp": "packed tied_embeddings packed_recompute moe_bias fused_terms",
    "fsdp_tp_pp_interleaved": "qk_norm",
    "hsdp_tp_pp": "accumulation",
    "fsdp_cp_pp": "packed moe_packed window",
    "tp_cp_pp": "packed_recompute moe",
    "pp_ep_fsdp": "moe moe_packed moe_recompute",
    "fsdp_tp_pp_ep": "moe_bias",
    "hsdp_tp_ep": "moe",
}
# Latent attention, and what gpt-oss has.
_BY_MODEL = {
    "fsdp_2": "mla mla_packed mla_plain_queries mla_bf16 mla_compile mla_moe moe_clamped gpt_oss",
    "tp": "mla mla_packed mla_plain_queries mla_bf16 mla_compile moe_clamped",
    "tp_whole": "mla mla_packed",
    "cp": "mla mla_packed mla_plain_queries mla_compile",
    "cp_ring": "mla_packed",
    "pp_1f1b": "mla mla_packed mla_moe gpt_oss",
    "ep": "moe_clamped gpt_oss",
    "fsdp_tp": "mla_packed mla_plain_queries",
    "tp_cp": "mla_packed",
    "tp_pp": "mla",
    "tp_ep": "mla_moe moe_clamped",
}
# Images as tokens.
_BY_IMAGES = {
    "fsdp_2": "towers towers_recompute towers_compile towers_bf16 image_experts image_experts_recompute",
    "fsdp_4": "towers image_experts",
    "hsdp_2x2": "towers image_experts",
    "tp": "towers image_experts towers_recompute",
    "tp_whole": "image_experts towers",
    "cp": "towers image_experts",
    "cp_ring": "image_experts towers",
    "pp_1f1b": "towers image_experts towers_recompute",
    "pp_zero_bubble": "towers image_experts",
    "fsdp_tp": "towers image_experts",
    "tp_cp": "towers image_experts",
    "tp_pp": "image_experts towers",
    "fsdp_pp_1f1b": "towers",
    "fsdp_tp_pp": "image_experts",
}
# Pictures through an encoder; tp and cp together would cut the stream twice, and cross-attention has no stages. All by SGD:
# an encoder's biases begin at 0, where steps of AdamW are rounding noise over eps in some entries.
_BY_PICTURES = {
    "one_rank": "pictures cross picture_towers picture_experts",
    "fsdp_2": "pictures cross picture_towers picture_experts pictures_recompute pictures_bf16 cross_recompute pictures_compile",
    "fsdp_3": "cross pictures",
    "fsdp_4": "pictures cross picture_towers picture_experts",
    "hsdp_2x2": "picture_experts picture_towers cross pictures",
    "tp": "pictures cross picture_towers picture_experts cross_recompute pictures_recompute",
    "tp_whole": "cross pictures picture_experts picture_towers",
    "cp": "pictures cross picture_towers picture_experts pictures_recompute",
    "cp_ring": "cross pictures picture_experts picture_towers",
    "pp_1f1b": "pictures picture_towers picture_experts pictures_recompute",
    "pp_interleaved": "picture_towers pictures",
    "pp_zero_bubble": "picture_experts pictures",
    "pp_zbv": "pictures picture_towers",
    "fsdp_tp": "pictures cross picture_towers picture_experts",
    "hsdp_tp": "cross pictures",
    "fsdp_cp": "picture_experts picture_towers cross pictures",
    "fsdp_pp_1f1b": "pictures picture_experts",
    "hsdp_pp": "picture_towers pictures",
    "tp_pp": "pictures picture_experts",
    "cp_pp": "picture_towers pictures",
    "fsdp_tp_pp": "picture_towers pictures",
    "fsdp_cp_pp": "picture_experts pictures",
}


def _cells() -> Iterator[Cell]:
    """Those that show what layouts do; then every other feature on one rank, where kernels are what can differ."""
    chosen = tuple(_of_layouts())
    done = {cell.feature for cell in chosen if cell.layout == "one_rank"}
    done |= {name for name, f in FEATURES.items() if f.deferred}  # of ranks, which fp32 has not
    yield from chosen
    for number, feature in enumerate(f for f in FEATURES if f not in done):
        # steps of AdamW are rounding noise over eps in some biases of an encoder
        adamw = number % 2 and FEATURES[feature].pictures is None
        yield Cell("one_rank", feature, OPTIMIZERS[bool(adamw)])


def _of_layouts() -> Iterator[Cell]:
    for layout in LAYOUTS:
        both = _ON_ONE_RANK if layout == "one_rank" else ()
        both = _DATA_FEATURES if layout in _DATA_LAYOUTS else both
        yield from (Cell(layout, f, o) for f in both for o in OPTIMIZERS)
        for chosen in (_CHOSEN, _BY_MODEL, _BY_IMAGES):
            for number, feature in enumerate(chosen.get(layout, "").split()):
                yield Cell(layout, feature, OPTIMIZERS[number % 2])
        yield from (
            Cell(layout, feature, "sgd") for feature in _BY_PICTURES.get(layout, "").split()
        )
        for name, chosen in BY_NAME.items():
            yield from (Cell(layout, feature, name) for feature in chosen.get(layout, "").split())


def _covering(cells: tuple[Cell, ...]) -> Iterator[Cell]:
    """Few cells in which everything occurs that occurs in any, the small ones first."""
    cells = tuple(c for c in cells if c.feature != "inductor")  # half a minute each
    missing = {part for cell in cells for part in cell.parts}
    while missing:
        gains = {c: len(c.parts & missing) / LAYOUTS[c.layout].world ** 0.5 for c in cells}
        best = max(gains, key=lambda c: gains[c])
        missing -= best.parts
        yield best


CELLS = tuple(_cells())
# What the tests run: every axis, combination of axes, schedule, feature and optimizer, on several ranks where it can.
SMOKE = tuple(sorted(_covering(tuple(_of_layouts())), key=CELLS.index))
