"""Logits of Forge's model and of transformers' on the same tokens."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from forge_ckpt.hf import fill_tensor
from forge_core import initialise
from forge_parallel import materialise
from forge_train._shared.problems import invalid
from forge_train.config.schema import BuiltInModelConfig
from forge_train.config.vlm import VLMModelConfig
from forge_train.errors import ConfigError, JobError
from forge_train.hf.check_inputs import inputs_of
from forge_train.trainer.build import build_model

#: Largest difference over the largest logit in fp32: rounding gives 1e-6, another function over 1e-2.
BOUND = 1e-3


def why_not_compared(section: BuiltInModelConfig) -> str | None:
    """Why an import does not compare logits of itself: transformers is not installed, or there is no memory for it."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    with torch.device("meta"):
        state = build_model(section, 0).state_dict()
    needed, free = 8 * sum(t.numel() for t in state.values()), _free_memory()
    if needed <= free:
        return None
    return f"two models in fp32 need {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"


def _free_memory() -> float:
    """Bytes that the machine has left, or the container may use; no limit where neither is known."""
    free = math.inf
    for path, line, unit in (
        ("/proc/meminfo", r"MemAvailable:\s+(\d+)", 1024),
        ("/sys/fs/cgroup/memory.max", r"(\d+)", 1),
    ):
        with contextlib.suppress(OSError):
            if found := re.search(line, Path(path).read_text()):
                free = min(free, int(found[1]) * unit)
    return free


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
    difference, largest, sizes = 0.0, 1e-30, []
    with torch.no_grad():
        for tokens, ours, given in inputs_of(model, section, theirs):
            wanted = theirs(tokens, **given).logits
            shown = wanted != torch.finfo(wanted.dtype).min  # Chameleon hides its image tokens
            found = (model(tokens, **ours) - wanted)[shown].abs().max()
            # nan is larger than any number here
            difference = float(torch.maximum(found, torch.tensor(difference)))
            largest = max(float(wanted[shown].abs().max()), largest)
            sizes.append(
                f"{' x '.join(map(str, tokens.shape))} tokens{' with images' * bool(ours)}"
            )
    relative = difference / largest
    line = (
        f"check: largest difference of logits {difference:.2e}, {relative:.2e} of the largest "
        f"({', '.join(sizes)}, fp32)"
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
