"""[lora]: low-rank adapters that a run trains in place of the model's weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from forge_core.lora import LoRAConfig
from forge_train._shared.problems import Problem, problems_of, raise_problems


def _field(default: Any, help: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help})


@dataclasses.dataclass(frozen=True)
class LoRASection:
    """Adapters of linear layers; with any, all other weights are frozen and saved once."""

    rank: int = _field(0, "rank of the adapters; 0: none, all weights are trained")
    alpha: float = _field(LoRAConfig.alpha, "an adapter's output is multiplied by alpha / rank")
    patterns: tuple[str, ...] = _field(
        LoRAConfig().patterns, "names of linear layers that get an adapter, as in fnmatch"
    )
    whole: tuple[str, ...] = _field(
        (),
        "names of weights that are trained themselves beside the adapters, as in fnmatch: 'adapter.*' of a model with "
        "images",
    )
    base_dtype: Literal["bf16", "fp32"] = _field(
        "bf16", "of the frozen weights, in memory and on disk; fp32 keeps what they were, exactly"
    )

    def __post_init__(self) -> None:
        raise_problems("", _problems(self))

    @property
    def adapters(self) -> LoRAConfig | None:
        """The configuration of the adapters; None without any."""
        return LoRAConfig(self.patterns, self.rank, self.alpha) if self.rank else None


def _problems(c: LoRASection) -> Iterator[Problem]:
    if c.rank:
        try:
            LoRAConfig(c.patterns, c.rank, c.alpha)
        except ValueError as error:
            yield from problems_of(error)
        return
    default = {field.name: field.default for field in dataclasses.fields(c)}
    for key, value in default.items():
        if getattr(c, key) != value:
            rule, fix = "belongs to adapters, and rank is 0", "give rank = 8, or remove it"
            yield Problem(key, "requires", getattr(c, key), rule, fix)
