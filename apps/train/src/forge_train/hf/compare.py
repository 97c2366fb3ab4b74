"""Logits of Forge's model and of transformers' on the same tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from forge_ckpt.hf import fill_tensor
from forge_parallel import materialise
from forge_train.config.schema import BuiltInModelConfig
from forge_train.errors import ConfigError, JobError
from forge_train.trainer.build import build_model

#: Largest difference over the largest logit in fp32: rounding gives 1e-6, another function over 1e-2.
BOUND = 1e-3


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
        raise ConfigError(
            [
                "--check needs the package transformers; pip install transformers, or leave --check out"
            ]
        ) from error
    transformers.utils.logging.disable_progress_bar()
    try:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        ).eval()
    except (ValueError, OSError, RuntimeError, KeyError) as error:
        raise ConfigError([f"{folder}: transformers cannot load it: {error}"]) from error
    model = materialise(build_model(section, 0), torch.device("cpu")).eval()
    state = model.state_dict()
    for name, tensor in tensors:
        fill_tensor(name, state[name], tensor)
    shape = (2, min(64, section.max_seq_len))
    tokens = torch.randint(section.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = theirs(tokens).logits
        difference = float((model(tokens) - wanted).abs().max())
    relative = difference / max(float(wanted.abs().max()), 1e-30)
    line = (
        f"check: largest difference of logits {difference:.2e}, {relative:.2e} of the largest "
        f"({shape[0]} x {shape[1]} tokens, fp32)"
    )
    if not relative <= BOUND:  # nan too
        raise JobError(
            [f"{folder}: {line}, and must be at most {BOUND} of it; do not use this copy"]
        )
    return line
