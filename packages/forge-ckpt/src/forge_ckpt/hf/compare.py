"""Logits of a model and of transformers' on the same inputs."""

import contextlib
import importlib.util
import logging
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from forge_ckpt._shared.problems import invalid

#: Largest difference over the largest logit in fp32: rounding gives 1e-6, another function over 1e-2.
BOUND = 1e-3
#: Tokens (2, S), and keywords of our model and of transformers', in two dicts because their names differ.
Inputs = tuple[Tensor, dict[str, Any], dict[str, Any]]


class Comparison(NamedTuple):
    """The largest difference of logits, over the largest logit, and a line about it."""

    relative: float
    line: str


def why_not_compared(tensors: Iterable[Tensor]) -> str | None:
    """Why a model of these tensors cannot be compared here: transformers is not installed, or there is no memory for two."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    needed, free = 8 * sum(t.numel() for t in tensors), _free_memory()
    if needed <= free:
        return None
    return f"two models in fp32 need {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"


def _free_memory() -> float:
    """Bytes that the machine has left, or the container may use; no limit where neither is known."""
    free = math.inf
    for path, line, scale in (
        ("/proc/meminfo", r"MemAvailable:\s+(\d+)", 1024),
        ("/sys/fs/cgroup/memory.max", r"(\d+)", 1),
    ):
        with contextlib.suppress(OSError):
            if found := re.search(line, Path(path).read_text()):
                free = min(free, int(found[1]) * scale)
    return free


@torch.no_grad()
def compare_logits(
    model: nn.Module,
    folder: Path,
    inputs: Callable[[Any], Sequence[Inputs]],
    kind: str = "CausalLM",
) -> Comparison:
    """Compare the logits of `model` with those of the model that transformers loads from `folder`.

    `inputs` makes tokens and keywords for both, given transformers' model; `kind` is that of its auto class, as in
    `AutoModelForCausalLM`. Both compute in fp32 on the CPU and are held at once. ValueError where transformers is not
    installed or cannot load the folder.
    """
    # importing it tells of kernels for GPUs that are not here
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        import transformers
    except ImportError as error:
        rule, fix = "needs the package transformers", "pip install transformers, or leave it out"
        raise invalid("", "requires", ..., rule, fix) from error
    transformers.utils.logging.disable_progress_bar()
    try:
        loader = getattr(transformers, f"AutoModelFor{kind}")
        theirs = loader.from_pretrained(folder, dtype=torch.float32).eval()
    except (ValueError, OSError, RuntimeError, KeyError) as error:
        rule = f"cannot be loaded by transformers: {error}"
        raise invalid("", "unsupported", str(folder), rule) from error

    difference, largest, sizes = 0.0, 1e-30, []
    for tokens, ours, given in inputs(theirs):
        wanted = theirs(tokens, **given).logits
        shown = wanted != torch.finfo(wanted.dtype).min  # Chameleon hides its image tokens
        found = (model(tokens, **ours) - wanted)[shown].abs().max()
        # torch.maximum keeps a nan, which Python's max may drop: it then counts as the largest difference
        difference = float(torch.maximum(found, torch.tensor(difference)))
        largest = max(float(wanted[shown].abs().max()), largest)
        sizes.append(f"{' x '.join(map(str, tokens.shape))} tokens{' with images' * bool(ours)}")

    relative = difference / largest
    line = (
        f"check: largest difference of logits {difference:.2e}, {relative:.2e} of the largest "
        f"({', '.join(sizes)}, fp32)"
    )
    return Comparison(relative, line)
