"""A decoder with pictures in every layout has the loss and gradients of one process; rows without pictures among them.

"deep" has features for its first blocks (DeepStack) and positions of three axes, as Qwen3-VL; "patches" is its
encoder, of pictures of several shapes, and "shapes" the native one of them; "clip" one of pictures of one size;
"cross" is no joint decoder, but blocks of cross-attention with open gates, where one token stands for a picture.
"pool" and "resampler" are adapters with attention. "towers", "experts" and "chosen" have weights by modality. In
"tree" the first document of a row has two branches, which share a picture, and pictures see themselves whole in
"ahead"; "forest" is both, with towers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_core import initialise
from forge_core.model import MRopeConfig
from forge_data import Loader, Ragged
from forge_parallel import ParallelConfig, global_count, make_meshes, parallelize
from forge_parallel.compute import extra_problems
from forge_parallel.micro_batches import divide_batch
from forge_parallel.pipeline import parts_of
from forge_testing import RankError, run_on_ranks
from forge_testing.runs import make_job
from forge_train import load_job
from forge_train.trainer.compute import make_compute
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

pytestmark = pytest.mark.distributed
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
    initialise(model, 0, std=0.1, residual_std=0.1)
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


LAYOUTS: list[tuple[str, int, dict[str, Any], int]] = [
    ("plain", 1, {}, 2),
    ("plain", 2, {}, 1),  # text-only rows on one rank beside pictures on the other
    ("clip", 2, {}, 2),
    ("deep", 3, {"recompute": "full"}, 1),
    ("deep", 2, {"compile": True}, 2),
    ("plain", 4, {"dp_replicate": 2}, 2),
    ("plain", 2, {"tp": 2}, 4),
    ("deep", 2, {"tp": 2, "sequence_parallel": False}, 4),
    ("clip", 2, {"tp": 2}, 4),
    ("deep", 4, {"tp": 2}, 2),
    ("plain", 2, {"cp": 2}, 4),
    ("deep", 4, {"cp": 2, "cp_exchange": "ring"}, 2),
    ("deep", 2, {"pp": 2}, 2),
    ("plain", 2, {"pp": 2, "pp_schedule": "zbv_zero_bubble"}, 2),
    ("clip", 4, {"pp": 2}, 1),
    ("pool", 2, {}, 1),
    ("pool", 2, {"tp": 2}, 4),
    ("resampler", 2, {}, 1),
    ("resampler", 2, {"tp": 2}, 4),
    ("resampler", 2, {"cp": 2}, 4),
    ("resampler", 2, {"pp": 2}, 2),
    ("patches", 2, {}, 1),
    ("patches", 2, {"tp": 2}, 4),
    ("patches", 2, {"cp": 2}, 4),
    ("patches", 2, {"pp": 2}, 2),
    ("shapes", 2, {}, 1),
    ("shapes", 2, {"recompute": "full"}, 2),
    ("shapes", 2, {"compile": True}, 2),
    ("shapes", 2, {"tp": 2}, 4),
    ("shapes", 2, {"cp": 2}, 4),
    ("shapes", 2, {"pp": 2}, 2),
    ("deep", 4, {"pp": 2, "cp": 2}, 2),
    ("deep", 4, {"pp": 2, "tp": 2}, 2),
    ("cross", 2, {}, 1),
    ("cross", 4, {"dp_replicate": 2, "recompute": "full"}, 2),
    ("cross", 2, {"compile": True}, 2),
    ("cross", 2, {"tp": 2}, 4),
    ("cross", 2, {"tp": 2, "sequence_parallel": False}, 4),
    ("cross", 2, {"cp": 2}, 4),
    ("towers", 2, {}, 1),
    ("towers", 2, {"recompute": "full"}, 2),
    ("towers", 2, {"tp": 2}, 4),
    ("towers", 2, {"cp": 2}, 4),
    ("towers", 2, {"pp": 2}, 2),
    ("towers", 4, {"pp": 2, "cp": 2}, 2),
    ("towers", 2, {"pp": 2, "pp_schedule": "zbv_zero_bubble"}, 2),
    ("experts", 2, {"pp": 2, "pp_schedule": "zbv_zero_bubble"}, 2),
    ("experts", 2, {}, 1),
    ("experts", 4, {"dp_replicate": 2, "recompute": "full"}, 2),
    ("experts", 2, {"tp": 2}, 4),
    ("experts", 2, {"cp": 2}, 4),
    ("tree", 2, {}, 1),
    ("tree", 2, {"compile": True}, 2),
    ("tree", 2, {"tp": 2}, 4),
    ("tree", 2, {"pp": 2}, 2),
    ("ahead", 2, {"recompute": "full"}, 2),
    ("ahead", 2, {"compile": True}, 2),
    ("ahead", 2, {"tp": 2, "sequence_parallel": False}, 4),
    ("ahead", 2, {"pp": 2, "pp_schedule": "zbv_zero_bubble"}, 2),
    ("forest", 4, {"dp_replicate": 2, "recompute": "full"}, 2),
    ("forest", 2, {"tp": 2}, 4),
    ("forest", 4, {"pp": 2, "tp": 2}, 2),
    ("chosen", 2, {"recompute": "full"}, 2),
    ("chosen", 2, {"tp": 2}, 4),
    ("chosen", 2, {"pp": 2}, 2),
]


@pytest.mark.parametrize(("kind", "world", "keys", "micro_batch"), LAYOUTS, ids=str)
def test_loss_and_gradients_are_those_of_one_process(
    tmp_path: Path, kind: str, world: int, keys: dict[str, Any], micro_batch: int
) -> None:
    """F75: ranks without a picture run the encoder all the same, and its gradients are reduced."""
    model, batch = build(kind), next(Loader(Pictures(kind), ROWS))
    total = torch.zeros(())
    for row in batch.split(1):
        names = {*model.extra_inputs, *model.mask_inputs}
        media = {name: row.extras[name] for name in names if name in row.extras}
        logits = model(row.tokens, row.positions, row.document_ids, **media)
        loss = F.cross_entropy(logits[0], row.labels[0], reduction="sum") / batch.label_weight
        loss.backward()
        total += loss.detach()
    told = run_on_ranks(world, step, make_job(tmp_path), kind, keys, micro_batch)
    assert sum(loss for loss, _ in told) == pytest.approx(float(total), rel=1e-5)
    found: dict[str, Tensor] = {}
    for _, mine in told:
        found |= mine
    trained = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for name, gradient in trained.items():
        if name.endswith("k_proj.bias"):  # the softmax leaves it without one
            assert found[name].abs().max() < 1e-8
            continue
        bound = 1e-4 if gradient.numel() == 1 else 1e-5  # of a gate: one sum whose terms cancel
        assert (found[name] - gradient).abs().max() <= bound * gradient.abs().max(), name
    assert kind == "clip" or len(trained) == len(list(model.parameters()))


def units_of_encoder(kind: str, dtype: torch.dtype) -> tuple[list[bool], set[str], float]:
    """On a rank, with a frozen encoder of `dtype`: whether its blocks are sharded while the decoder runs, the dtypes of
    its shards, and the largest gradient of the adapter."""
    config = ParallelConfig(device="cpu", precision="fp32")
    model = build(kind)
    model.vision.requires_grad_(False).to(dtype)
    parallelize(model, config, make_meshes(config), seq_len=S)
    seen: list[bool] = []

    def look(*_: Any) -> None:
        held = (p for block in model.sharding_units() for p in block.parameters())
        seen.extend(hasattr(p, "device_mesh") for p in held)

    model.layers["1"].register_forward_pre_hook(look)
    batch = next(Loader(Pictures(kind), 2))
    media = {name: batch.extras[name] for name in model.extra_inputs if name in batch.extras}
    out = model(batch.tokens, batch.positions, batch.document_ids, **media)
    out.square().mean().backward()
    dtypes = {str(p.dtype) for p in model.vision.parameters()}
    return (
        seen,
        dtypes,
        max(float(p.grad.full_tensor().abs().max()) for p in model.adapter.parameters()),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["plain", "clip", "shapes"])
def test_a_frozen_encoder_is_sharded_by_block_in_its_dtype(kind: str, dtype: torch.dtype) -> None:
    """And the root does not hold it while the decoder runs."""
    for seen, dtypes, gradient in run_on_ranks(2, units_of_encoder, kind, dtype):
        assert len(seen) > 8
        assert all(seen)
        assert dtypes == {str(dtype)}
        assert gradient > 0.0


def test_context_and_tensor_parallelism_together_are_refused(tmp_path: Path) -> None:
    config = load_job(make_job(tmp_path)).config
    layout = replace(config.parallel, cp=2, tp=2).axes(4)
    (problem,) = extra_problems(build(), Loader(Pictures(), 4).filler(1), layout)
    assert "parallel.cp 2 splits the stream behind the embedding" in problem


def test_masks_of_whole_rows_are_refused_where_cp_splits_them(tmp_path: Path) -> None:
    config = load_job(make_job(tmp_path)).config
    layout = replace(config.parallel, cp=2).axes(2)
    batch = Loader(Pictures("tree"), 4).filler(1)
    (problem,) = extra_problems(build("tree"), batch, layout)
    assert (
        "cp 2 cuts the rows whose tokens see each other by branch_ids of the data; use" in problem
    )
    (problem,) = extra_problems(nn.Linear(2, 2), batch, layout)
    assert "have branch_ids, and the model would let the branches" in problem
    with pytest.raises(RankError, match=r"VLM takes image_ids, by which tokens of whole rows see"):
        run_on_ranks(2, step, make_job(tmp_path), "ahead", {"cp": 2}, 4)


def test_cross_attention_in_stages_of_a_pipeline_is_refused() -> None:
    words = r"VLM must not be cut into pipeline stages: fusion\.name 'cross_attention'"
    with pytest.raises(ValueError, match=words):
        parts_of(build("cross"))


@pytest.mark.slow
def test_features_of_more_layers_than_a_stage_has_are_refused(tmp_path: Path) -> None:
    keys = {"pp": 2, "pp_schedule": "zbv_zero_bubble"}
    with pytest.raises(RankError, match=r"features of 2 layers .* stage of a pipeline has 1; use"):
        run_on_ranks(2, step, make_job(tmp_path), "deep", keys, 2)


def test_experts_that_choose_among_whole_rows_are_refused_where_cp_splits_them(
    tmp_path: Path,
) -> None:
    with pytest.raises(RankError, match="'expert_choice' chooses among the tokens of whole rows"):
        run_on_ranks(2, step, make_job(tmp_path), "chosen", {"cp": 2}, 4)
