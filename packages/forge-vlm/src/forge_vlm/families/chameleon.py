"""The decoder of Chameleon (Chameleon team 2024, arXiv 2405.09818): text and discrete image tokens in one stream.

Shapes: B rows, S tokens, H heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_core import Attention, TransformerConfig
from forge_core.families import LLAMA, Family
from forge_core.kinds import ParameterKind
from forge_vlm._shared.problems import Problem, ProblemError, invalid, problems_of
from forge_vlm.config import VLMConfig
from forge_vlm.families.keys import Row, beyond_decoder, check_values
from forge_vlm.modalities import ModalityConfig
from forge_vlm.vision import VisionConfig

__all__ = ["CHAMELEON", "ChameleonAttention", "HeadLayerNorm"]

_EPS = 1e-5  # whatever the config's norm_eps is
_IMAGE = "IMGIMG"  # what names of image tokens begin with
_MIXER = "forge_vlm.families.chameleon:ChameleonAttention"
_BLOCKS = {False: "pre_norm", True: "post_norm"}  # by swin_norm
#: Keys that say nothing about the decoder: those of its image tokeniser, and of files.
_OWN = ("vq_config", "vocabulary_map", "swin_norm", "model_parallel_size", "image_token_id")


class HeadLayerNorm(nn.Module):
    """LayerNorm over the width of a head, with weights of each head: (..., H, D) -> (..., H, D)."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, width))
        self.bias = nn.Parameter(torch.empty(heads, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the initial values, also after `to_empty`."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], eps=_EPS) * self.weight + self.bias

    def parameter_kinds(self) -> dict[str, ParameterKind]:
        """A norm and a bias for each head; they begin at ones and zeros."""
        return {"weight": "stacked_norm", "bias": "stacked_bias"}


class ChameleonAttention(Attention):
    """Attention with a `HeadLayerNorm` on queries and on keys, as `mixer` of a config by its import path.

    TransformerConfig(vocab_size=256, mixer="forge_vlm.families.chameleon:ChameleonAttention")
    """

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__(config)
        if config.qk_norm:
            rule = "duplicates the norms of Chameleon"
            raise invalid("qk_norm", "excludes", True, rule, "remove it")
        self.norms_heads = True
        norms: Any = [
            HeadLayerNorm(heads, self.head_dim)
            for heads in (config.num_heads, config.resolved_num_kv_heads)
        ]
        self.q_norm, self.k_norm = norms

    def parallel_roles(self) -> dict[str, Any]:
        """Whole on each rank: weights of the norms differ by head."""
        return {"*": "opaque"}


def _from_hf(hf: Mapping[str, Any]) -> VLMConfig:
    decoder = {k: v for k, v in hf.items() if k not in _OWN} | {"model_type": "llama"}
    try:
        text = LLAMA.config_from_hf(decoder)
    except ValueError as error:
        raise ProblemError(problems_of(error), "chameleon") from error
    images = sorted(i for n, i in hf.get("vocabulary_map", {}).items() if n.startswith(_IMAGE))
    if not images or images != list(range(images[0], images[0] + len(images))):
        rule = (
            f"must give image tokens, which begin with {_IMAGE}, one range of ids, and gives {len(images)} from {images[:1]} "
            f"to {images[-1:]}"
        )
        fix = "give a complete config.json"
        raise invalid("vocabulary_map", "range", ..., rule, fix, where="chameleon")
    own = {
        "mixer": _MIXER,
        "block": _BLOCKS[bool(hf.get("swin_norm", False))],
        "vision": VisionConfig("none"),
        "modalities": {"image": ModalityConfig(images[0], len(images), discrete=True)},
    }
    return VLMConfig(**{**vars(text), **own})


def _to_hf(config: TransformerConfig) -> dict[str, Any]:
    assert isinstance(config, VLMConfig)
    discrete = [name for name, own in config.modalities.items() if own.discrete]
    given = (
        ("fusion.name", config.fusion.name, "joint_decoder"),
        ("vision.name", config.vision.name, "none"),
        ("mixer", config.mixer, _MIXER),
        ("positions", config.positions, "sequential"),
        ("modalities", discrete, list(config.modalities)),
        *beyond_decoder(config),
    )
    rule = f"must be one of {', '.join(_BLOCKS.values())} in this family"
    block = Problem("block", "unknown", config.block, rule, "choose another family")
    check_values("chameleon", given, () if config.block in _BLOCKS.values() else [block])
    decoder = LLAMA.config_to_hf(replace(config, mixer="attention", block="pre_norm"))
    return {
        **decoder,
        "model_type": "chameleon",
        "architectures": ["ChameleonForConditionalGeneration"],
        "swin_norm": config.block == "post_norm",
    }


def _rows(config: TransformerConfig) -> tuple[Row, ...]:
    norms = [
        (f"model.layers.{{i}}.self_attn.{n}_norm.{kind}", f"layers.{{i}}.mixer.{n}_norm.{kind}", ())
        for n in "qk"
        for kind in ("weight", "bias")
    ]
    behind = config.block == "post_norm"
    renamed = {"mixer_norm": "mixer_post_norm", "feed_forward_norm": "feed_forward_post_norm"}
    rows = []
    for theirs, ours, ops in LLAMA.rows_of(config):
        assert isinstance(ours, str)
        stem, _, kind = ours.rpartition(".")
        head, _, name = stem.rpartition(".")
        moved = f"{head}.{renamed[name]}.{kind}" if behind and name in renamed else ours
        rows.append((theirs, moved, ops))
    return (*rows, *norms)


#: Tensors below `model.vqmodel` are those of the image tokeniser, which gives the tokens of an image (`get_image_tokens` of
#: transformers); they and `vocabulary_map` stay in the folder. Logits are those of transformers but for image tokens, which
#: it sets to the least number, so that it writes text alone.
CHAMELEON = Family("chameleon", (), _from_hf, _to_hf, _rows, ("model.vqmodel.*",))
