"""Layouts of experts in memory: Forge's, those of transformers and of torchtitan.

Shapes: E experts, D width, F width inside an expert. A matrix of Forge is (in, out), of the others (out, in):

    Forge            gate_proj (E, D, F), up_proj (E, D, F), down_proj (E, F, D)
    transformers 5   gate_up_proj (E, 2 F, D), rows of the gate first; down_proj (E, D, F)
    torchtitan       w1 (E, F, D) gate, w3 (E, F, D) up, w2 (E, D, F) down

Files of Hugging Face checkpoints have each expert by itself: `forge_moe.families` maps those.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from forge_moe._shared.problems import Problem, raise_problems

__all__ = ["experts_from", "experts_to"]

Layout = Literal["transformers", "torchtitan"]

#: Layout -> {name there: Forge's names, whose rows it has one after another}.
_NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "transformers": {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
    "torchtitan": {"w1": ("gate_proj",), "w2": ("down_proj",), "w3": ("up_proj",)},
}


def experts_to(layout: Layout, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the state dict of `Experts` with SwiGLU to another layout.

        theirs.load_state_dict(experts_to("transformers", moe.experts.state_dict()))

    The tensors are new and contiguous. Raises ValueError for an unknown layout and for other names, such as biases.
    """
    names = _names(layout)
    _check_names(state, {own for parts in names.values() for own in parts})
    return {
        name: torch.cat([state[own].mT for own in parts], dim=1).contiguous()
        for name, parts in names.items()
    }


def experts_from(layout: Layout, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the experts of another layout to the state dict of `Experts` with SwiGLU: the inverse of `experts_to`.

    moe.experts.load_state_dict(experts_from("torchtitan", theirs.state_dict()))
    """
    names = _names(layout)
    _check_names(state, names)
    found = {}
    for name, parts in names.items():
        for own, matrix in zip(parts, state[name].chunk(len(parts), dim=1)):
            found[own] = matrix.mT.contiguous()
    return found


def _names(layout: str) -> dict[str, tuple[str, ...]]:
    if layout not in _NAMES:
        rule, fix = "is not a layout of experts", f"use one of {', '.join(_NAMES)}"
        raise_problems("", [Problem("layout", "unknown", layout, rule, fix)])
    return _NAMES[layout]


def _check_names(state: Mapping[str, Tensor], wanted: set[str] | Mapping[str, object]) -> None:
    """ValueError for each tensor that is missing, and each that the layout has no place for."""
    problems = [Problem(n, "missing", ..., "is missing") for n in wanted if n not in state]
    rule, fix = "has no equivalent", "convert experts of activation swiglu without biases"
    problems += [Problem(n, "extra", ..., rule, fix) for n in state if n not in wanted]
    raise_problems("experts", problems)
