"""What both sides share: the model's description, the seed weights, the settings of an update."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from batches import PICTURE, PIXELS, SEQ, VOCAB
from cells import FEATURES, LAYOUTS, Cell, Feature
from torch import Tensor, nn

from forge_core import Init, Transformer, TransformerConfig
from forge_core.lora import LoRAConfig, LoRALinear, lora
from forge_core.model import FeedForward, MTPConfig
from forge_moe import MoE, MoEConfig
from forge_testing.decay import groups_by_decay
from forge_vlm import (
    VLM,
    CrossAttentionConfig,
    FusionConfig,
    ModalityConfig,
    VisionConfig,
    VLMConfig,
)
from forge_vlm.fusion import CrossAttentionBlock, MoMaConfig
from forge_vlm.vision import ViTConfig

# Five times the usual: logits are not flat, gradients are of order one and every step is clipped.
STD = {"std": 0.1, "residual_std": 0.05}
MAX_NORM = 0.5
SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
# eps: with 1e-8 the rounding noise of a gradient near zero becomes a whole step. lr: what is left of
# that noise, about 1e-7 / eps of a step, must stay far below the bound.
ADAMW: dict[str, Any] = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.1}
DIM, HIDDEN = 32, 72
AHEAD_WEIGHT = 0.5
MIXTURE: dict[str, Any] = {"num_experts": 4, "top_k": 2, "hidden_dim": 24, "num_shared_experts": 1}


class Piece(NamedTuple):
    """What a rank holds of a tensor: `values` begin at `offset` of a whole of `shape`."""

    values: Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass
class Run:
    """What is compared: per step the loss, all gradients before clipping and their norm; the weights
    after the last update. Tensors are in pieces; one process has a piece that is the whole. Of
    mixtures also how often each expert was chosen on this rank, by layer and step. `seed` is what it
    began from."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Piece]] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    weights: dict[str, Piece] = field(default_factory=dict)
    routes: list[dict[str, Tensor]] = field(default_factory=list)
    seed: int = 0


class Branches(nn.Module):
    """Two feed-forwards, of which a micro-batch takes one: the first token that it sees says which."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = FeedForward(DIM, HIDDEN), FeedForward(DIM, HIDDEN)

    def forward(self, x: Tensor, ctx: Any = None) -> Tensor:
        taken: Tensor = (self.left if x[0, 0, 0] > 0 else self.right)(x)  # (B, S, D)
        return taken

    def parallel_roles(self) -> dict[str, str]:
        rows = self.left.parallel_roles().items()
        return {f"{side}.{row}": role for side in ("left", "right") for row, role in rows}

    def flops_per_token(self, seq_len: int) -> float:
        return self.left.flops_per_token(seq_len)


def build_model(
    cell: Cell, aux: str, base_dtype: torch.dtype | None = torch.bfloat16
) -> Transformer:
    """The cell's model; router losses are handed out ("return") or join the gradient ("attach"); base_dtype is
    that of the frozen parameters below adapters."""
    feature, mixture = FEATURES[cell.feature], FEATURES[cell.feature].moe

    def feed_forward(layer: int) -> nn.Module:
        if feature.branches:
            return Branches()
        if layer % 2 == 0:
            return FeedForward(DIM, HIDDEN)
        return MoE(MoEConfig(dim=DIM, **{**MIXTURE, **mixture, "aux": aux}))

    kind: Any = TransformerConfig
    if feature.images or feature.pictures:
        kind = functools.partial(VLMConfig, **_of_images(feature))
    config = kind(
        num_layers=LAYOUTS[cell.layout].layers,
        num_heads=4,
        hidden_dim=HIDDEN,
        max_seq_len=SEQ,
        **{"dim": DIM, "vocab_size": VOCAB, "num_kv_heads": 2, **feature.model},
        mtp=MTPConfig(feature.ahead, AHEAD_WEIGHT),
    )
    own = mixture or feature.branches
    if isinstance(config, VLMConfig):
        return _with_open_gates(VLM(config))
    model = Transformer(config, feed_forward=feed_forward if own else None)
    if feature.lora:
        lora(model, LoRAConfig(**feature.lora), base_dtype)
        for module in model.modules():
            if isinstance(module, LoRALinear):
                module.init_table = functools.partial(_random_adapter, module.init_table)
    return model


def _of_images(feature: Feature) -> dict[str, Any]:
    """Keys of a model with a third of its ids for images, or with an encoder; its losses are those of tokens alone."""
    name: Any = feature.images or feature.pictures
    # the gradients of a router of pictures cancel to a ten-thousandth where its gates are normalised
    options: dict[str, Any] = {
        "moma": {
            "moma": MoMaConfig(hidden_dim=24, balance_loss=0.0, normalize=bool(feature.images))
        },
        "cross_attention": {"cross_attention": CrossAttentionConfig(every_n_layers=2)},
    }
    fusion = FusionConfig(name, **options.get(name, {}))
    if feature.images:
        images = ModalityConfig(first_id=40, num_ids=30, discrete=True)
        return {"vision": VisionConfig("none"), "modalities": {"image": images}, "fusion": fusion}
    vit = ViTConfig(image_size=PIXELS, patch_size=2, dim=16, num_layers=2, num_heads=2)
    pictures = {"image": ModalityConfig(PICTURE)}
    return {"vision": VisionConfig(vit=vit), "modalities": pictures, "fusion": fusion}


def _with_open_gates(model: VLM) -> VLM:
    """Gates of cross-attention begin at 0, where pictures change nothing."""
    for module in model.modules():
        if isinstance(module, CrossAttentionBlock):
            module.init_table = _half_open  # type: ignore[attr-defined]
    return model


def _half_open(std: float, residual_std: float) -> dict[str, Init]:
    return dict.fromkeys(("mixer_gate", "feed_forward_gate"), Init("constant", 0.5))


def _random_adapter(table: Callable[..., dict[str, Init]], *stds: float) -> dict[str, Init]:
    """Rows of an adapter that changes its layer from the first step on: `lora_b` begins at zero otherwise."""
    return {**table(*stds), "lora_b": Init("normal", 0.1)}


def mixtures(model: nn.Module) -> dict[str, MoE]:
    """The MoE layers by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, MoE)}


def routes(model: nn.Module) -> dict[str, Tensor]:
    """Choices of each expert (E,) since the last call, by layer."""
    return {n: m.statistics(reset=True)["counts"] for n, m in mixtures(model).items()}


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, norms do not."""
    return groups_by_decay(model.named_parameters(), weight_decay)


def weights(model: nn.Module) -> dict[str, Piece]:
    """Copies of all parameters and buffers."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: _piece(tensor) for name, tensor in tensors.items()}


def gradients(model: nn.Module, cell: Cell) -> dict[str, Piece]:
    """Copies, of every trained parameter; a missing one is an error of the cell, but of branches that none took."""
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    missing = found.keys() ^ {name for name, p in model.named_parameters() if p.requires_grad}
    assert not missing or FEATURES[cell.feature].branches, f"no gradient: {missing}"
    return {name: _piece(gradient) for name, gradient in found.items()}


def _piece(tensor: Any) -> Piece:
    """No communication: pieces are put together by the caller of the ranks."""
    shape = tuple(tensor.shape)
    if not hasattr(tensor, "placements"):
        return Piece(tensor.detach().clone(), (0,) * len(shape), shape)
    assert not any(placement.is_partial() for placement in tensor.placements)
    return Piece(tensor.to_local().detach().clone(), _offset(tensor, shape), shape)


def _offset(tensor: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Where this rank's part begins. FSDP2 cuts what tensor parallelism has left (its "strided" shards), so
    plain cuts come first. torch's own function errs where the parts of tp differ by one."""
    start, size = [0] * len(shape), list(shape)
    axes = [(axis, p) for axis, p in enumerate(tensor.placements) if hasattr(p, "dim")]
    for axis, placement in sorted(axes, key=lambda each: hasattr(each[1], "split_factor")):
        dim, ranks = placement.dim, tensor.device_mesh.size(axis)
        each = -(-size[dim] // ranks)
        before = min(size[dim], each * tensor.device_mesh.get_local_rank(axis))
        start[dim], size[dim] = start[dim] + before, min(each, size[dim] - before)
    assert size == list(tensor.to_local().shape)
    return tuple(start)
