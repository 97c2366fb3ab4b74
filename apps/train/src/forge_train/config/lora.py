"""[lora]: low-rank adapters that a run trains in place of the model's weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

from forge_core.lora import LoRAConfig
from forge_train._shared.fields import Checked
from forge_train._shared.problems import Problem, problems_of


@dataclasses.dataclass(frozen=True)
class LoRASection(Checked):
    """Adapters of linear layers; with any, all other weights are frozen and saved once."""

    rank: int = 0
    """rank of the adapters; 0: none, all weights are trained"""
    alpha: float = LoRAConfig.alpha
    """an adapter's output is multiplied by alpha / rank"""
    patterns: tuple[str, ...] = LoRAConfig().patterns
    """names of linear layers that get an adapter, as in fnmatch"""
    whole: tuple[str, ...] = ()
    """names of weights that are trained themselves beside the adapters, as in fnmatch: 'adapter.*' of a model with
    images"""
    base_dtype: Literal["bf16", "fp32"] = "bf16"
    """of the frozen weights, in memory and on disk; fp32 keeps what they were, exactly"""

    def _problems(self) -> Iterator[Problem]:
        if self.rank:
            try:
                LoRAConfig(self.patterns, self.rank, self.alpha)
            except ValueError as error:
                yield from problems_of(error)
            return
        for item in dataclasses.fields(self):
            if (value := getattr(self, item.name)) != item.default:
                rule, fix = "belongs to adapters, and rank is 0", "give rank = 8, or remove it"
                yield Problem(item.name, "requires", value, rule, fix)

    @property
    def adapters(self) -> LoRAConfig | None:
        """The configuration of the adapters; None without any."""
        return LoRAConfig(self.patterns, self.rank, self.alpha) if self.rank else None
