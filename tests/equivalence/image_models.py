"""Small decoders with pictures, one of each kind, and the layouts that `test_image_layouts.py` tries them in.

"deep" has features for its first blocks (DeepStack) and positions of three axes, as Qwen3-VL; "patches" is its
encoder, of pictures of several shapes, and "shapes" the native one of them; "clip" one of pictures of one size;
"cross" is no joint decoder, but blocks of cross-attention with open gates, where one token stands for a picture.
"pool" and "resampler" are adapters with attention. "towers", "experts" and "chosen" have weights by modality. In
"tree" the first document of a row has two branches, which share a picture, and pictures see themselves whole in
"ahead"; "forest" is both, with towers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_core import initialize
from forge_core.model import MRopeConfig
from forge_data import Loader, Ragged
from forge_parallel import global_count, make_meshes, parallelize
from forge_parallel.compute import divide_batch
from forge_testing.references import once
from forge_train import load_job
from forge_train.build.objective import make_compute
from forge_vlm import (
    VLM,
    AdapterConfig,
    CrossAttentionConfig,
    FusionConfig,
    ModalityConfig,
    VisionConfig,
    VLMConfig,
)
from forge_vlm.adapters import AttentionalPoolConfig, ResamplerConfig
from forge_vlm.fusion import MoMaConfig
from forge_vlm.vision import Features, ViT, ViTConfig, cut_patches

S, D, VOCAB, ROWS, IMAGE, PLACES = 16, 32, 64, 8, 63, 4
VIT = ViTConfig(image_size=8, patch_size=4, dim=16, num_layers=2, num_heads=2)
#: Weights by modality; the loss of balance is one of micro-batches, and one process here takes rows one by one.
MIXTURES = {
    "towers": FusionConfig("mixture_of_transformers"),
    "experts": FusionConfig("moma", moma=MoMaConfig(balance_loss=0.0)),
    "chosen": FusionConfig("moma", moma=MoMaConfig(router="expert_choice")),
}


#: Ids of batches by which tokens see each other.
MASKS = {
    "tree": ("branch_ids",),
    "ahead": ("image_ids",),
    "forest": ("branch_ids", "image_ids"),
}


class Deep(ViT):
    """Features of the stream's width behind its blocks too, for as many blocks of the decoder."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__(VisionConfig(vit=VIT))
        self.deep = nn.ModuleList(nn.Linear(self.width, D) for _ in range(2))

    def forward(self, images: Any) -> Features:
        found = super().forward(images)
        layers = tuple(linear(found.tokens).flatten(0, 1) for linear in self.deep)
        return found._replace(layers=layers)


class Pictures:
    """Rows of 0, 1 or 2 pictures among text, of two documents; a third of the rows have none."""

    def __init__(self, kind: str = "plain") -> None:
        self.axes = kind in ("deep", "patches")
        self.merge = 2 if kind == "patches" else 1
        packed = kind in ("patches", "shapes")
        self.media = ("patches", "grids") if packed else ("images",)
        self.masks = MASKS.get(kind, ())
        self.places = 1 if kind in ("cross", "pool") else PLACES

    def arrays(self, ids: np.ndarray) -> dict[str, Any]:
        rows = [self.row(int(i)) for i in ids]
        empty = self.row(0)
        names = ("tokens", "labels", "positions", "document_ids", *self.masks)
        stacked = {n: np.stack([r[n] for r in rows]) if rows else empty[n][None][:0] for n in names}
        return {**stacked, **{name: ragged(name, [empty, *rows]) for name in self.media}}

    def row(self, i: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng(i)
        tokens = random.integers(1, IMAGE, S)
        number = i % 3
        for image in range(number):
            tokens[1 + 8 * image : 1 + 8 * image + self.places] = IMAGE
        documents = (np.arange(S) >= 8).astype(np.int64)
        labels = np.where(np.append(tokens[1:], 0) == IMAGE, -100, np.append(tokens[1:], 0))
        labels[7] = labels[15] = -100
        branches = np.zeros(S, np.int64)
        branches[5:8] = 1 if "branch_ids" in self.masks else 0
        branches[7] *= 2  # one token of a second branch
        spans = np.where(tokens == IMAGE, documents, -1)
        return {
            **{"branch_ids": branches, "image_ids": spans},
            "tokens": tokens,
            "labels": labels,
            "document_ids": documents,
            "positions": self.positions(random),
            **self.pictures(random.integers(0, 256, (number, 3, 8, 8), dtype=np.uint8)),
        }

    def pictures(self, images: np.ndarray) -> dict[str, np.ndarray]:
        """As they are, or in patches that make 4 tokens: the second of a row is four times as wide as high."""
        if "images" in self.media:
            return {"images": images}
        shapes = [(1, 3, 8, 8), (1, 3, 4, 16)]
        cut = [
            cut_patches(
                torch.from_numpy(image).reshape(shape),
                patch_size=4 // self.merge,
                merge=self.merge,
                time=1,
            )
            for image, shape in zip(images, shapes)
        ]
        width = 3 * (4 // self.merge) ** 2
        none = torch.zeros(0, width, dtype=torch.uint8), torch.zeros(0, 3, dtype=torch.int64)
        patches, grids = (torch.cat(tensors).numpy() for tensors in zip(none, *cut))
        return {"patches": patches, "grids": grids}

    def positions(self, random: np.random.Generator) -> np.ndarray:
        return random.integers(0, 9, (3, S)) if self.axes else np.arange(S) % 8

    def fingerprint(self) -> dict[str, str | int]:
        return {"pictures": 1}

    def __len__(self) -> int:
        return 100


def ragged(name: str, rows: list[dict[str, np.ndarray]]) -> Ragged:
    """The entries of all rows but the first, which has none and gives their shape."""
    offsets = torch.from_numpy(np.cumsum([len(row[name]) for row in rows]))
    return Ragged(torch.from_numpy(np.concatenate([row[name] for row in rows])), offsets)


def build(kind: str = "plain") -> VLM:
    vision = VisionConfig(vit=VIT)
    options: dict[str, Any] = {}
    if kind == "deep":
        vision = VisionConfig(f"{__name__}:Deep")
        options = {"mrope": MRopeConfig((2, 1, 1)), "positions": "mrope"}
    if kind == "patches":
        qwen: dict[str, Any] = {
            **{"hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "depth": 3},
            **{"patch_size": 2, "temporal_patch_size": 1, "num_position_embeddings": 16},
            **{"out_hidden_size": D, "deepstack_visual_indexes": [0, 1]},
        }
        vision = VisionConfig(
            "transformers", transformers={"model_type": "qwen3_vl_vision", **qwen}
        )
        options = {"mrope": MRopeConfig((2, 1, 1)), "positions": "mrope"}
        options["adapter"] = AdapterConfig("none")
    if kind == "shapes":
        vision = VisionConfig("packed_vit", vit=VIT)
    if kind in MIXTURES:
        options = {"fusion": MIXTURES[kind]}
    if kind == "clip":
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
        keys = {**sizes, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
        clip = {"model_type": "clip_vision_model", **keys}
        vision = VisionConfig(
            "transformers", transformers=clip, select_layer=(-2,), select_feature="patch"
        )
    if kind == "pool":
        pool = AttentionalPoolConfig(num_heads=4)
        options["adapter"] = AdapterConfig("attentional_pool", attentional_pool=pool)
    if kind == "resampler":
        latents = ResamplerConfig(num_latents=PLACES, num_heads=4)
        options["adapter"] = AdapterConfig("resampler", resampler=latents)
    if kind in MASKS:
        options = {"fusion": MIXTURES["towers"]} if kind == "forest" else {}
        options["bidirectional"] = "none" if kind == "tree" else "image"
    if kind == "cross":
        cross = CrossAttentionConfig(every_n_layers=2, qk_norm=True)
        options = {"fusion": FusionConfig("cross_attention", cross_attention=cross)}
    model = VLM(
        VLMConfig(
            vocab_size=VOCAB,
            dim=D,
            num_layers=4,
            num_heads=4,
            max_seq_len=S,
            vision=vision,
            modalities={"image": ModalityConfig(IMAGE)},
            **options,
        )
    )
    initialize(model, 0, std=0.1, residual_std=0.1)
    for name, parameter in model.named_parameters():
        if name.endswith("_gate"):
            nn.init.constant_(parameter, 0.5)
    return model


def step(
    job: Path, kind: str, keys: dict[str, Any], micro_batch: int | None
) -> tuple[float, dict[str, Tensor]]:
    """On a rank: its part of the loss, and the gradients that it holds, whole."""
    flat = {f"parallel.{key}": value for key, value in keys.items()}
    sizes = {"model.dim": D, "model.num_layers": 4, "model.num_heads": 4, "data.seq_len": S}
    config = load_job(job, {**flat, **sizes, "train.global_batch": ROWS}).config
    meshes = make_meshes(config.parallel)
    parts = divide_batch(config.parallel, ROWS, meshes.batch_size, micro_batch)
    model = parallelize(build(kind), config.parallel, meshes, seq_len=S)
    compute = make_compute(model, config, meshes, parts, None)
    loader = Loader(
        Pictures(kind),
        ROWS,
        meshes.batch_rank,
        meshes.batch_size,
        micro_batch=parts.size,
        num_micro_batches=parts.count,
    )
    batch = next(loader)
    count = float(global_count(batch.label_weight, meshes))
    loss = float(compute.gradients(batch, lambda: count))
    return loss, {n: _whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def _whole(gradient: Any) -> Tensor:
    whole: Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return whole


def alone(kind: str) -> tuple[float, dict[str, Tensor], int]:
    """Loss and gradients of one process, which takes the rows one by one, and the number of its parameters."""
    return once(["decoder with pictures", kind], lambda _: _alone(kind))


def _alone(kind: str) -> tuple[float, dict[str, Tensor], int]:
    model, batch = build(kind), next(Loader(Pictures(kind), ROWS))
    total = 0.0
    for row in batch.split(1):
        names = {*model.extra_inputs, *model.mask_inputs}
        media = {name: row.extras[name] for name in names if name in row.extras}
        logits = model(row.tokens, row.positions, row.document_ids, **media)
        loss = F.cross_entropy(logits[0], row.labels[0], reduction="sum") / batch.label_weight
        loss.backward()
        total += float(loss.detach())
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return total, found, len(list(model.parameters()))


@dataclass(frozen=True)
class ImageLayout:
    """Ranks, the keys of `parallel` that arrange them, rows of a micro-batch, and what is tried by it."""

    world: int
    keys: dict[str, Any] = field(default_factory=dict)
    micro_batch: int = 2
    axes: frozenset[str] = frozenset()

    @property
    def new_schedule(self) -> bool:
        """Whether its schedule halves the backward, which needs torch 2.13."""
        return self.keys.get("pp_schedule") == "zbv_zero_bubble"


def _layout(world: int, axes: str, micro_batch: int = 2, **keys: Any) -> ImageLayout:
    return ImageLayout(world, keys, micro_batch, frozenset(axes.split()))


_ZBV: dict[str, Any] = {"pp": 2, "pp_schedule": "zbv_zero_bubble"}
_FULL: dict[str, Any] = {"recompute": "full"}
_WHOLE: dict[str, Any] = {"tp": 2, "sequence_parallel": False}
#: With micro-batches of one row, readers with a picture are beside readers with none.
LAYOUTS: dict[str, ImageLayout] = {
    "one rank": _layout(1, "one_rank"),
    "fsdp compiled": _layout(2, "dp_shard compile", compile=True),
    "three readers": _layout(3, "dp_shard filler recompute", 1, **_FULL),
    "hsdp": _layout(4, "dp_shard dp_replicate", 1, dp_replicate=2),
    "tp": _layout(2, "tp", 4, tp=2),
    "fsdp tp": _layout(4, "dp_shard tp", 1, tp=2),
    "replicated tp whole": _layout(4, "dp_replicate tp_whole recompute", 1, dp_replicate=2, **_WHOLE, **_FULL),
    "cp": _layout(2, "cp", 4, cp=2),
    "fsdp cp": _layout(4, "dp_shard cp recompute", 1, cp=2, **_FULL),
    "fsdp cp ring": _layout(4, "dp_shard cp cp_ring", 1, cp=2, cp_exchange="ring"),
    "fsdp pp": _layout(4, "dp_shard pp", 1, pp=2),
    "tp pp": _layout(4, "tp pp recompute", tp=2, pp=2, **_FULL),
    "cp pp": _layout(4, "cp pp", cp=2, pp=2),
    "tp zbv": _layout(4, "tp pp zbv", tp=2, **_ZBV),
    "tp whole zbv": _layout(4, "tp_whole pp zbv recompute", **_WHOLE, **_ZBV, **_FULL),
}  # fmt: skip
#: What each kind must meet.
AXES: dict[str, str] = {
    "plain": "one_rank dp_shard dp_replicate tp cp zbv",
    "clip": "dp_shard tp pp",
    "deep": "dp_shard filler recompute compile tp cp cp_ring pp",
    "pool": "dp_shard tp",
    "resampler": "dp_shard tp cp pp",
    "patches": "dp_shard tp cp pp",
    "shapes": "dp_shard recompute compile tp cp pp",
    "cross": "dp_shard dp_replicate recompute compile tp tp_whole cp",
    "towers": "dp_shard recompute tp cp pp zbv",
    "experts": "dp_shard dp_replicate recompute tp cp zbv",
    "chosen": "recompute tp pp",
    "tree": "dp_shard compile tp pp",
    "ahead": "recompute compile tp_whole zbv",
    "forest": "dp_replicate recompute tp pp",
}
#: Layouts that refuse a kind: rows whose tokens see or choose each other are not cut, blocks with images are no stages.
REFUSED = {
    "deep": {"tp zbv", "tp whole zbv"},
    "cross": {"pp", "tp pp", "cp pp", "tp zbv", "tp whole zbv"},
    **{kind: {"cp", "fsdp cp", "fsdp cp ring", "cp pp"} for kind in ("chosen", "tree", "ahead", "forest")},
    "patches": {"fsdp tp"},  # the convolution of its patches, in DTensors of two axes
}  # fmt: skip


def covering() -> list[tuple[str, str]]:
    """For each kind, few layouts in which it meets all of its axes."""
    found = []
    for kind, axes in AXES.items():
        missing = set(axes.split())
        left = [name for name in LAYOUTS if name not in REFUSED.get(kind, ())]
        while missing:
            gains = {n: len(LAYOUTS[n].axes & missing) / LAYOUTS[n].world ** 0.5 for n in left}
            best = max(left, key=lambda name: gains[name])
            missing -= LAYOUTS[best].axes
            found.append((kind, best))
    return found
