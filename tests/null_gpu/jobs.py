"""The jobs of the layouts campaign: every layout and option that a device decides on, in a model as small as can be."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_parallel import ParallelConfig
from forge_testing.vlm_jobs import TRANSFORMERS

Keys = dict[str, Any]
#: Steps of the first life and of both. Rows, evaluations and saves are at every FOURTH of them.
STEPS, MORE_STEPS, EVERY = 8, 10, 4
#: Steps of the first life in which nothing but training happens, behind those in which kernels are compiled.
STEADY = (3, 6, 7)


@dataclass(frozen=True)
class Job:
    """A job on some null GPUs; `reason` says why a steady step waits for the device, where it does."""

    ranks: int = 1
    keys: Keys = field(default_factory=dict)
    pictures: bool = False
    reason: str = ""

    def values(self) -> Keys:
        """All keys of the job, dotted."""
        pictures = _PICTURES | ({} if "model.vision.name" in self.keys else _VIT)
        found = {**_COMMON, **(pictures if self.pictures else _TEXT), **self.keys}
        parallel = {
            key.removeprefix("parallel."): value
            for key, value in found.items()
            if key.startswith("parallel.")
        }
        try:
            readers = ParallelConfig(**parallel).axes(self.ranks).batch_size
        except ValueError:  # layout = "auto" is chosen later
            readers = self.ranks
        return {"train.global_batch": 4 * readers, **found}

    @property
    def generates(self) -> bool:
        """Whether the model continues a text: one without pictures, that writes the sample at the end of its run."""
        return not self.pictures and self.values()["sample.max_new_tokens"] > 0

    def toml(self) -> str:
        """The job as a file."""
        return "".join(f"{_key(key)} = {_value(value)}\n" for key, value in self.values().items())


def write_data(folder: Path) -> None:
    """Write the files that jobs with pictures read: 40 pictures of several sizes, and 2,000 ids."""
    import numpy as np
    from PIL import Image

    lines = []
    for i in range(40):
        width, height = _SIZES[i % len(_SIZES)]
        Image.new("RGB", (width, height), (6 * i, 30, 30)).save(folder / f"{i}.png")
        asked = [{"type": "image", "image": f"{i}.png"}, {"type": "text", "text": "?"}]
        talk = [{"role": "user", "content": asked}, {"role": "assistant", "content": "red"}]
        lines.append(json.dumps({"messages": talk}))
    (folder / "strips.jsonl").write_text("\n".join(lines))
    ids = np.random.default_rng(0).integers(4, 32, 2000)
    ids[::20] = 3
    np.save(folder / "ids.npy", ids.astype(np.uint16))


_SIZES = [(8, 8), (24, 12), (8, 40), (16, 8), (30, 30)]


def _key(key: str) -> str:
    return ".".join(
        part if part.replace("_", "").isalnum() else json.dumps(part) for part in key.split(".")
    )


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


def _in(section: str, **keys: Any) -> Keys:
    return {f"{section}.{key}": value for key, value in keys.items()}


def _parallel(**keys: Any) -> Keys:
    return _in("parallel", **keys)


def _model(**keys: Any) -> Keys:
    return _in("model", **keys)


def _moe(**keys: Any) -> Keys:
    return _in("model.moe", **{"num_experts": 4, "width_multiplier": 0.5, **keys})


_COMMON = {
    "run.dir": "run",
    "parallel.device": "cuda",
    "train.steps": STEPS,
    "train.micro_batch": 2,
    "metrics.every_steps": EVERY,
    "metrics.console": "plain",
    "eval.every_steps": EVERY,
    "eval.sequences": 4,
    "checkpoint.every_steps": EVERY,
    "sample.max_new_tokens": 2,
    "health.at_start": False,  # it would stop a run on a device that computes nothing
    "health.memory_mib": 1,
}
_TEXT = {
    **_model(dim=64, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=128, max_seq_len=256),
    "data.seq_len": 64,
    "data.sources.text.name": "builtin",
}
_PICTURES = {
    **_model(name="vlm", dim=32, num_layers=2, num_heads=2, max_seq_len=16),
    "model.modalities.image.first_id": 2,
    "data.seq_len": 8,
    "data.sources.squares.name": "forge_testing.squares:Squares",
    "sample.max_new_tokens": 0,
}
_VIT = _in("model.vision.vit", image_size=8, patch_size=4, dim=16, num_layers=1, num_heads=2)
#: Files that `write_data` writes: pictures of several sizes, and ids of which some are those of pictures.
_STRIPS = {
    "model.vision.name": "packed_vit",
    "model.modalities.image.first_id": 257,
    **_in("model.vision.vit", image_size=8, patch_size=4, dim=16, num_layers=1, num_heads=2),
    **_in("data.sources.squares", name="forge_vlm.data:open_source", path="strips.jsonl"),
    "data.sources.squares.options": {
        "resolution": {"name": "budget", "budget": {"multiple": 4, "min_pixels": 32, "max_pixels": 288}},
        **{"patch_size": 4, "merge": 1, "patch_time": 1, "template": "plain"},
    },
    **{"data.seq_len": 48, "model.max_seq_len": 48, "eval.every_steps": 0},
}  # fmt: skip
_DRAWINGS = {
    "model.vision.name": "none",
    "model.vocab_size": 32,
    **_in("model.modalities.image", first_id=16, num_ids=16, discrete=True),
    **_in("data.sources.squares", name="npy", path="ids.npy"),
    "data.sources.squares.npy.eos_id": 3,
    **{"data.seq_len": 16, "eval.every_steps": 0},
}
_MLA = {
    **_model(mixer="mla", num_kv_heads=4),
    **_in(
        "model.mla",
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
    ),
}
_TIERED = {"model.layer_types.local.window": 16, "model.layer_pattern": ["local", "global"]}
#: Layers that torchao's rule finds large enough, by tensors and by rows.
_WIDE = _model(hidden_dim=1040)
_WIDER = _model(dim=1088, num_heads=8, hidden_dim=4112, num_layers=1)
_TENSORWISE = {**_WIDE, **_parallel(float8="tensorwise")}
_ROWWISE = {**_WIDER, **_parallel(float8="rowwise")}
_COMPILE = _parallel(compile=True)
_DEEP = {"model.num_layers": 4, "train.micro_batch": 1}
_TP, _WHOLE = _parallel(tp=2), _parallel(tp=2, sequence_parallel=False)
_CP, _RING = _parallel(cp=2), _parallel(cp=2, cp_exchange="ring")
_EP = {**_parallel(ep=2), **_moe()}
_NODES = _parallel(gpus_per_node=2, across_nodes=True)
_PACKED = {"data.packing.name": "first_fit"}
_LOOP = (
    "the loop over experts takes their numbers of rows from the device, once per layer and forward"
)
_SPLITS = "split sizes of the exchange of tokens come from the device, once per mixture and forward"


def _pipe(schedule: str, **more: Any) -> Keys:
    return {**_DEEP, **_parallel(pp=2, pp_schedule=schedule, **more)}


def _seen(scope: str) -> Keys:
    """Strips whose tokens also see what is ahead of them in a scope."""
    options = {**_STRIPS["data.sources.squares.options"], "bidirectional": scope}
    return {
        **_STRIPS,
        **_model(bidirectional=scope),
        "data.sources.squares.options": options,
    }


_ONE_GPU = {
    "plain": {},
    "fp32": _parallel(precision="fp32"),
    "bf16 weights": _parallel(param_dtype="bf16"),
    "compile": _COMPILE,
    "compile, recompute full": {**_COMPILE, **_parallel(recompute="full")},
    "compile, memory budget": {**_COMPILE, **_parallel(memory_budget=0.5)},
    "recompute full": _parallel(recompute="full"),
    "recompute every 2": _parallel(recompute="full", recompute_every=2),
    "recompute selective": _parallel(recompute="selective"),
    "sdpa flash": _parallel(sdpa="flash"),
    "sdpa efficient": _parallel(sdpa="efficient"),
    "sdpa math": _parallel(sdpa="math"),
    "packed": _PACKED,
    "packed best_fit fp32": {"data.packing.name": "best_fit", **_parallel(precision="fp32")},
    "packed compile": {**_PACKED, **_COMPILE},
    "packed, wide heads": {**_model(num_heads=2, head_dim=264), **_PACKED},
    "packed, odd heads": {**_model(num_heads=2, head_dim=20), **_PACKED},
    "window": {**_model(**{"attention.window": 16}), **_PACKED},
    "layer types": _TIERED,
    "softcap": _model(**{"attention.softcap": 20.0, "logits_softcap": 30.0}),
    "sinks": {**_model(**{"attention.sinks": True}), **_PACKED},
    "mask of one's own": {**_model(**{"attention.mask": "forge_testing.extensions:self_only"}), "sample.max_new_tokens": 0},
    "options of dense models": _model(
        norm="layer_norm", feed_forward="gelu", qkv_bias=True, o_bias=True, feed_forward_bias=True,
        tie_embeddings=True, qk_norm=True, qk_norm_over="all_heads", partial_rotary_factor=0.5,
    ),
    "sandwich, yarn": _model(
        block="sandwich", norm="rms_norm_plus_one", feed_forward="geglu_tanh",
        **{"rope_scaling.name": "yarn", "rope_scaling.original_max_position": 32, "rope_scaling.truncate": False},
    ),
    "post norm, mup": _model(block="post_norm", parametrization="mup", **{"mup.base_dim": 32}),
    "mla": _MLA,
    "mla compile": {**_MLA, **_COMPILE},
    "mla neighbors, yarn, packed": {**_MLA, "model.mla.rope_interleave": True, **_model(**{"rope_scaling.name": "yarn"}), **_PACKED},
    "mtp": _model(**{"mtp.num_modules": 2}),
    "mtp fused": {**_model(**{"mtp.num_modules": 1}), "train.loss": "fused_cross_entropy"},
    "lora": {"lora.rank": 4},
    "lora fp32 base": {"lora.rank": 4, "lora.base_dtype": "fp32"},
    "lion": {"optimizer.name": "lion"},
    "muon": {"optimizer.name": "muon"},
    "muon fp32 original": {"optimizer.name": "muon", **_in("optimizer.muon", ns_dtype="fp32", adjust="original", nesterov=False)},
    "schedule-free": {"optimizer.name": "schedule_free_adamw", "schedule.name": "constant"},
    "adamw bf16 state": {"optimizer.state_dtype": "bf16"},
    "ema": {"optimizer.ema.decay": 0.9},
    "fused loss": {"train.loss": "fused_cross_entropy"},
    "fused loss compile": {"train.loss": "fused_cross_entropy", **_COMPILE},
    "loss terms": _in("train.cross_entropy", z_loss=1e-4, label_smoothing=0.1),
    "fused loss terms": {"train.loss": "fused_cross_entropy", **_in("train.fused_cross_entropy", z_loss=1e-4, label_smoothing=0.1)},
    "no clipping": {"train.max_grad_norm": "none"},
    "stages": {**_in("optimizer.groups.head", patterns=["lm_head.*"]), **_in("train.stages.later", start_step=3, lr_multipliers={"head": 0.5})},
    "statistics": {"metrics.gradients_every_steps": 4, "metrics.source_shares": True},
    "profile": {"profile.num_steps": 1, "profile.start_step": 5, "profile.memory": True},
    "float8 tensorwise": _TENSORWISE,
    "float8 rowwise": _ROWWISE,
    "float8 tensorwise compile": {**_TENSORWISE, **_COMPILE},
    "float8 rowwise compile": {**_ROWWISE, **_COMPILE},
    "saves that wait": {"checkpoint.wait": True},
    "saves with blake3": {"checkpoint.digest": "blake3", "checkpoint.best": "val_loss"},
    "data workers": {"data.num_workers": 1, "eval.at_start": True},
    "read ahead": {"data.prefetch": 2},
    "spikes are skipped": {"resilience.nonfinite.action": "skip", **_in("resilience.spike", action="skip", of="both", window=2)},
    "spikes roll back": {"resilience.nonfinite.action": "rollback", **_in("resilience.spike", action="rollback", of="grad_norm", window=2)},
    "spikes stop": _in("resilience.spike", action="stop", window=2),
    "device probes": _in("health", at_start=True, every_steps=4, action="warn"),
    "moe": _moe(),
    "moe grouped_mm": _moe(backend="grouped_mm"),
    "moe float8": _moe(backend="float8"),
    "moe float8 compile": {**_moe(backend="float8"), **_COMPILE},
    "moe sigmoid": _moe(
        router="sigmoid_topk", bias_update_rate=1e-3, bias_center=True, bias_schedule="cosine", sequence_loss_weight=1e-2,
        num_groups=2, top_groups=1, group_score="max", normalize="before_top_k",
    ),
    "moe linear warm-up of the bias": _moe(bias_update_rate=1e-3, bias_schedule="linear_warmup", expert_bias=True),
    "moe sequence loss": _moe(aux_loss_weight=1e-2, aux_scope="sequence", z_loss_weight=1e-3, **{"num_shared_experts": 1, "shared_gate": True}),
    "moe micro-batch loss": {**_moe(aux_loss_weight=1e-2, aux_scope="micro_batch"), "metrics.expert_loads": True},
    "moe global loss": _moe(aux_loss_weight=1e-2, aux_scope="global_batch"),
    "moe lagged loss": _moe(aux_loss_weight=1e-2, aux_scope="global_batch_lagged"),
    "moe capacity by position": _moe(capacity_factor=1.0),
    "moe capacity by weight": _moe(capacity_factor=1.0, drop_policy="probability"),
    "moe experts choose": {**_moe(router="expert_choice"), "sample.max_new_tokens": 0},
    "moe clamped": _moe(activation="clamped_swiglu", bias=True, router_bias=True),
    "moe gelu": _moe(activation="gelu"),
    "moe compile": {**_moe(), **_COMPILE},
    "moe recompute": {**_moe(), **_parallel(recompute="full")},
    "moe selective": {**_moe(), **_parallel(recompute="selective")},
    "moe mla": {**_moe(), **_MLA},
}  # fmt: skip
_LOOPS = {
    "moe batched": _moe(backend="batched"),
    "moe loop": _moe(backend="loop"),
    "moe fp32": {**_moe(), **_parallel(precision="fp32")},
    "moe loop compile": {**_moe(backend="loop"), **_COMPILE},
}
_RANKS: dict[str, tuple[int, Keys]] = {
    "fsdp 2": (2, {}),
    "replicated 2": (2, _parallel(dp_replicate=2)),
    "fsdp 2, no reshard": (2, _parallel(reshard_after_forward=False)),
    "fsdp 2, bf16 sums": (2, _parallel(reduce_dtype="bf16")),
    "fsdp 2, bf16 weights": (2, _parallel(param_dtype="bf16")),
    "fsdp 2, fp32": (2, _parallel(precision="fp32")),
    "fsdp 2, compile": (2, _COMPILE),
    "fsdp 2, chosen": (2, _parallel(layout="auto")),
    "fsdp 2, packed": (2, _PACKED),
    "fsdp 2, float8 tensorwise": (2, _TENSORWISE),
    "fsdp 2, float8 all-gather": (2, {**_TENSORWISE, **_parallel(float8_all_gather=True)}),
    "fsdp 2, float8 all-gather compile": (2, {**_TENSORWISE, **_parallel(float8_all_gather=True), **_COMPILE}),
    "fsdp 2, float8 rowwise": (2, _ROWWISE),
    "fsdp 2, muon": (2, {"optimizer.name": "muon"}),
    "fsdp 2, ema": (2, {"optimizer.ema.decay": 0.9}),
    "fsdp 2, lora": (2, {"lora.rank": 4}),
    "fsdp 2, fused loss": (2, {"train.loss": "fused_cross_entropy"}),
    "fsdp 2, saves that wait": (2, {"checkpoint.wait": True}),
    "fsdp 2, statistics": (2, {"metrics.gradients_every_steps": 4}),
    "replicated 2, compared": (2, {**_parallel(dp_replicate=2), **_in("resilience.replicas", every_steps=4, action="warn")}),
    "tp 2": (2, _TP),
    "tp 2, whole sequences": (2, _WHOLE),
    "tp 2, compile": (2, {**_TP, **_COMPILE}),
    "tp 2, float8 rowwise": (2, {**_TP, **_ROWWISE, "model.hidden_dim": 8224}),
    "tp 2, muon": (2, {**_TP, "optimizer.name": "muon"}),
    "tp 2, mla": (2, {**_TP, **_MLA}),
    "tp 2, fused loss": (2, {**_TP, "train.loss": "fused_cross_entropy"}),
    "tp 2, recompute selective": (2, {**_TP, **_parallel(recompute="selective")}),
    "cp 2": (2, _CP),
    "cp 2, ring": (2, _RING),
    "cp 2, packed": (2, {**_CP, **_PACKED}),
    "cp 2, ring, packed": (2, {**_RING, **_PACKED}),
    "cp 2, compile": (2, {**_CP, **_COMPILE}),
    "pp 2 gpipe": (2, _pipe("gpipe")),
    "pp 2 1f1b": (2, _pipe("1f1b")),
    "pp 2 1f1b, compile": (2, {**_pipe("1f1b"), **_COMPILE}),
    "pp 2 interleaved": (2, _pipe("interleaved_1f1b")),
    "pp 2 zero bubble": (2, _pipe("interleaved_zero_bubble")),
    "pp 2 zbv": (2, _pipe("zbv_zero_bubble")),
    "pp 2 dualpipev": (2, _pipe("dualpipev")),
    "hsdp 2 x 2": (4, _parallel(dp_replicate=2)),
    "fsdp 2, tp 2": (4, _TP),
    "tp 2, cp 2": (4, {**_TP, **_CP}),
    "tp 2, pp 2": (4, {**_TP, **_pipe("1f1b")}),
    "cp 2 ring, pp 2 zero bubble": (4, {**_RING, **_pipe("interleaved_zero_bubble")}),
    "fsdp 2, pp 2 1f1b": (4, _pipe("1f1b")),
    "fsdp 2, tp 2, cp 2": (8, {**_TP, **_CP}),
    "fsdp 2, tp 2, pp 2": (8, {**_TP, **_pipe("1f1b")}),
    "hsdp 2 x 2, tp 2": (8, {**_TP, **_parallel(dp_replicate=2)}),
    "tp 2, cp 2, pp 2 zbv": (8, {**_TP, **_CP, **_pipe("zbv_zero_bubble")}),
}  # fmt: skip
_EXPERTS: dict[str, tuple[int, Keys]] = {
    "ep 2": (2, _EP),
    "ep 2, chunks": (2, {**_EP, "model.moe.dispatch_chunks": 2}),
    "ep 2, batched": (2, {**_EP, "model.moe.backend": "batched"}),
    "ep 2, float8": (2, {**_EP, "model.moe.backend": "float8"}),
    "ep 2, compile": (2, {**_EP, **_COMPILE}),
    "ep 2, recompute": (2, {**_EP, **_parallel(recompute="full")}),
    "tp 2, ep 2": (2, {**_EP, **_TP}),
    "cp 2, ep 2": (2, {**_EP, **_CP}),
    "ep 4, hierarchical": (4, {**_EP, **_NODES, "parallel.ep": 4, "model.moe.dispatcher": "hierarchical"}),
    "pp 2, ep 2": (4, {**_EP, **_pipe("1f1b")}),
    "pp 2 dualpipev, ep 2": (4, {**_EP, **_pipe("dualpipev")}),
    "hsdp 2 x 2, tp 2, ep 2": (8, {**_EP, **_TP, **_parallel(dp_replicate=2)}),
    "fsdp 2, tp 2, pp 2, ep 4": (8, {**_EP, **_TP, **_pipe("1f1b"), "parallel.ep": 4}),
}  # fmt: skip
_PLACE = {"data.sources.squares.options": {"places": 1}}


def _adapter(name: str, **more: Any) -> Keys:
    return _in(
        "model.adapter", name=name, **{f"{name}.{key}": value for key, value in more.items()}
    )


def _fusion(name: str, **more: Any) -> Keys:
    return _in("model.fusion", name=name, **{f"{name}.{key}": value for key, value in more.items()})


_CROSS = {**_fusion("cross_attention"), **_PLACE}
_TOWERS = _fusion("mixture_of_transformers")
_MOMA = _fusion("moma")
_CHOSEN = {"eval.every_steps": 0}  # a choice among all tokens is not computed in evaluation
_WITH_PICTURES: dict[str, tuple[int, Keys]] = {
    "images": (1, {}),
    "images, compile": (1, _COMPILE),
    "images as they are": (1, {**_adapter("none"), **_in("model.vision.vit", dim=32)}),  # prose: the name of a case
    "images, linear": (1, _adapter("linear")),
    "images, mlp without bias": (1, _adapter("mlp", bias=False)),
    "images, pixel shuffle": (1, {**_adapter("pixel_shuffle", bias=True), **_PLACE}),
    "images, pixel shuffle and mlp": (1, {**_adapter("pixel_shuffle_mlp"), **_PLACE}),
    "images, average pool": (1, {**_adapter("average_pool", bias=False), **_PLACE}),
    "images, attentional pool": (1, {**_adapter("attentional_pool"), **_PLACE}),
    "images, resampler": (1, _adapter("resampler", num_latents=4)),
    "images, encoder of transformers": (1, TRANSFORMERS),
    "images of any size": (1, _STRIPS),  # prose: the name of a case
    "images of any size, compile": (1, {**_STRIPS, **_COMPILE}),  # prose: the name of a case
    "images as tokens": (1, _DRAWINGS),
    "images, mrope": (1, {**_model(positions="mrope", **{"mrope.sections": [4, 2, 2]}), "data.sources.squares.options": {"axes": 3}}),
    "images, mrope in chunks": (1, {**_model(positions="mrope", **{"mrope.sections": [4, 2, 2], "mrope.layout": "chunked"}), "data.sources.squares.options": {"axes": 3}}),
    "images, positions of text": (1, _model(positions="text_preserving")),
    **{f"images, {seen} sees itself": (1, _seen(seen)) for seen in ("image", "clip", "document", "prefix_lm")},
    "cross-attention": (1, _CROSS),
    "cross-attention, last image": (1, {**_CROSS, **_fusion("cross_attention", sees="last")}),
    "cross-attention, all images": (1, {**_CROSS, **_fusion("cross_attention", sees="all", qk_norm=True)}),
    "towers": (1, _TOWERS),
    "moma": (1, _MOMA),
    "moma, weights as they are": (1, _fusion("moma", normalize=False)),  # prose: the name of a case
    "moma, experts choose": (1, {**_fusion("moma", router="expert_choice"), **_CHOSEN}),
    "moma, experts choose in the micro-batch": (1, {**_fusion("moma", router="expert_choice", scope="micro_batch"), **_CHOSEN}),
    "moma, auxiliary routers": (1, {**_fusion("moma", router="auxiliary_router"), **_CHOSEN}),
    "images, fsdp 2": (2, {}),
    "images, tp 2": (2, _TP),
    "images, cp 2": (2, _CP),
    "images, pp 2": (2, {**_parallel(pp=2), "train.micro_batch": 1}),
    "cross-attention, fsdp 2": (2, _CROSS),
    "towers, fsdp 2": (2, _TOWERS),
    "towers, tp 2": (2, {**_TOWERS, **_TP}),
    "moma, fsdp 2": (2, _MOMA),
    "moma, ep 2": (2, {**_MOMA, **_parallel(ep=2)}),
}  # fmt: skip
_UNMASKED = (
    "the optimizer takes no mask, so the host looks whether the step is good before it updates"
)
_OFFLOAD = (
    "FSDP2 adds a further micro-batch's gradients on the host, and the clipped norm is read there"
)
_MODALITIES = "the tokens of each modality are counted on the device, and read once per forward"
_BY_MODALITY = ("mixture_of_transformers", "moma")
JOBS: dict[str, Job] = {
    **{name: Job(1, keys) for name, keys in _ONE_GPU.items()},
    **{name: Job(1, keys, reason=_LOOP) for name, keys in _LOOPS.items()},
    "optimizer from outside": Job(
        1, {"optimizer.name": "forge_testing.models:NamedSGD"}, reason=_UNMASKED
    ),
    "cpu offload": Job(1, _parallel(cpu_offload=True), reason=_OFFLOAD),
    **{name: Job(ranks, keys) for name, (ranks, keys) in _RANKS.items()},
    "fsdp 2, cpu offload": Job(2, _parallel(cpu_offload=True), reason=_OFFLOAD),
    **{name: Job(ranks, keys, reason=_SPLITS) for name, (ranks, keys) in _EXPERTS.items()},
    **{
        name: Job(
            ranks, keys, True, _MODALITIES if keys.get("model.fusion.name") in _BY_MODALITY else ""
        )
        for name, (ranks, keys) in _WITH_PICTURES.items()
    },
}
