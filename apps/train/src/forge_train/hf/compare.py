"""Logits of Forge's model and of transformers' on the same tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from forge_ckpt.hf import fill_tensor
from forge_core import initialise
from forge_parallel import materialise
from forge_train._shared.problems import invalid
from forge_train.config.schema import BuiltInModelConfig
from forge_train.config.vlm import VLMModelConfig
from forge_train.errors import ConfigError, JobError
from forge_train.trainer.build import build_model

#: Largest difference over the largest logit in fp32: rounding gives 1e-6, another function over 1e-2.
BOUND = 1e-3
_LONGEST = 1024  #: tokens of a row with an image, which may be 576 of them


def _with_images(
    model: nn.Module, section: BuiltInModelConfig, tokens: Tensor, model_type: str
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Tokens with an image in each row, and the images for Forge's model and for transformers'; of encoders that take
    more than images of one size, tokens of text alone."""
    if not isinstance(section, VLMModelConfig):
        return tokens, {}, {}
    if not section.placeholders:
        return tokens, {}, {}
    place = next(iter(section.placeholders.values())).first_id
    tokens = torch.where(tokens == place, (place + 1) % section.vocab_size, tokens)
    vision, adapter = cast(Any, model.vision), cast(Any, model.adapter)
    if tuple(vision.extra_inputs) != ("images",) or section.fusion.name != "joint_decoder":
        return tokens, {}, {}
    one = vision.dummy("cpu")["images"]  # (1, 3, H, W)
    shape = (len(tokens), *one.shape[1:])
    images = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    features: Tensor = adapter(vision(images=images))  # (N, T, D)
    if features.size(1) + 1 >= tokens.size(1):
        rule = f"puts an image of {features.size(1)} tokens into rows of {tokens.size(1)}, which are too short"
        raise invalid("--check", "length", ..., rule, "leave it out", kind=ConfigError)
    tokens[:, 1 : 1 + features.size(1)] = place
    tiled = model_type in ("idefics3", "smolvlm")  # one tile of each image
    return tokens, {"images": images}, {"pixel_values": images[:, None] if tiled else images}


def compare(
    section: BuiltInModelConfig, tensors: Iterable[tuple[str, Tensor]], folder: Path
) -> str:
    """A line with the largest difference of logits between Forge's model of `tensors` and that of `folder`.

    Both compute in fp32 on the CPU and are held at once. ConfigError where transformers is not installed or
    cannot load the folder, JobError for logits that differ by more than rounding.
    """
    # importing it tells of kernels for GPUs that are not here
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        import transformers
    except ImportError as error:
        rule, fix = "needs the package transformers", "pip install transformers, or leave it out"
        raise invalid("--check", "requires", ..., rule, fix, kind=ConfigError) from error
    transformers.utils.logging.disable_progress_bar()
    kind = "ImageTextToText" if isinstance(section, VLMModelConfig) else "CausalLM"
    try:
        loader = getattr(transformers, f"AutoModelFor{kind}")
        theirs = loader.from_pretrained(folder, dtype=torch.float32).eval()
    except (ValueError, OSError, RuntimeError, KeyError) as error:
        rule = f"cannot be loaded by transformers: {error}"
        raise invalid("--check", "unsupported", str(folder), rule, kind=ConfigError) from error
    model = materialise(build_model(section, 0), torch.device("cpu")).eval()
    if isinstance(section, VLMModelConfig):
        initialise(model, 0)  # buffers of its encoder, which files do not hold
    state = model.state_dict()
    for name, tensor in tensors:
        fill_tensor(name, state[name], tensor)
    shape = (2, min(_LONGEST if kind == "ImageTextToText" else 64, section.max_seq_len))
    tokens = torch.randint(section.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        tokens, images, pixels = _with_images(model, section, tokens, theirs.config.model_type)
        wanted = theirs(tokens, **pixels).logits
        shown = wanted != torch.finfo(wanted.dtype).min  # Chameleon hides its image tokens
        difference = float((model(tokens, **images) - wanted)[shown].abs().max())
    relative = difference / max(float(wanted[shown].abs().max()), 1e-30)
    line = (
        f"check: largest difference of logits {difference:.2e}, {relative:.2e} of the largest "
        f"({shape[0]} x {shape[1]} tokens{', an image in each row' if images else ''}, fp32)"
    )
    if not relative <= BOUND:  # nan too
        rule = f"must be at most {BOUND} of the largest logit ({line})"
        raise invalid(
            "difference",
            "range",
            relative,
            rule,
            "do not use this copy",
            where=folder,
            kind=JobError,
        )
    return line
