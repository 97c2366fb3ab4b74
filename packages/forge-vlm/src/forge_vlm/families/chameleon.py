"""The decoder of Chameleon as Hugging Face stores it: text and discrete image tokens in one stream. Experimental."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from forge_core import TransformerConfig
from forge_core.families import LLAMA, Family
from forge_vlm._shared.problems import Problem, ProblemError, invalid, problems_of
from forge_vlm.config import VLMConfig
from forge_vlm.experimental.chameleon import ChameleonAttention, HeadLayerNorm
from forge_vlm.families.keys import Row, beyond_decoder, check_values
from forge_vlm.modalities import ModalityConfig
from forge_vlm.vision import VisionConfig

__all__ = ["CHAMELEON", "ChameleonAttention", "HeadLayerNorm"]

_IMAGE = "IMGIMG"  # what names of image tokens begin with
# in configs of earlier versions, so the path stays although the class is in forge_vlm.experimental
_MIXER = "forge_vlm.families.chameleon:ChameleonAttention"
_BLOCKS = {False: "pre_norm", True: "post_norm"}  # by swin_norm
#: Keys that say nothing about the decoder: those of its image tokenizer, and of files.
_OWN = ("vq_config", "vocabulary_map", "swin_norm", "model_parallel_size", "image_token_id")


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


#: Tensors below `model.vqmodel` are those of the image tokenizer, which gives the tokens of an image (`get_image_tokens` of
#: transformers); they and `vocabulary_map` stay in the folder. Logits are those of transformers but for image tokens, which
#: it sets to the least number, so that it writes text only.
CHAMELEON = Family("chameleon", (), _from_hf, _to_hf, _rows, ("model.vqmodel.*",))
