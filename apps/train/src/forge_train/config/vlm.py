"""[model] of name "vlm": the built-in transformer with an encoder of images, an adapter and a fusion."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from forge_train._shared.problems import Problem, raise_problems
from forge_train.config.schema import BuiltInModelConfig
from forge_vlm import VLMConfig


@dataclass(frozen=True)
class VLMModelConfig(VLMConfig, BuiltInModelConfig):
    """All keys of the built-in transformer, mixtures of experts among them, and what images need."""

    name: str = "vlm"
    """'vlm'"""

    def __post_init__(self) -> None:
        super().__post_init__()
        raise_problems("", _problems(self))


def _problems(c: VLMModelConfig) -> Iterator[Problem]:
    if c.moe.num_experts and c.fusion.name != "joint_decoder":
        rule = f"must be 0 with fusion.name {c.fusion.name!r}, whose blocks are its own"
        fix = "use 0, or fusion.name = 'joint_decoder'"
        yield Problem("moe.num_experts", "fusion", c.moe.num_experts, rule, fix)
    if c.parametrization == "mup":
        rule = "has no rule for the learning rates of an encoder and an adapter"
        fix = "use 'standard' with model.name 'vlm'"
        yield Problem("parametrization", "vision", c.parametrization, rule, fix)
