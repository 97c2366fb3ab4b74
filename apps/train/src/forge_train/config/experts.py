"""[model.moe]: the feed-forwards that are mixtures of experts, and their configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from forge_moe import MoEConfig
from forge_moe.config import MoEOptions
from forge_train._shared.problems import Problem, problems_of, raise_problems


def _field(default: Any, help: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help})


@dataclasses.dataclass(frozen=True)
class MoESection(MoEOptions):
    """Mixture of experts in the built-in transformer; num_experts 0 is a dense model.

    Widths come from the model, and router losses always join the gradient.
    """

    num_experts: int = _field(0, "experts of a mixture; 0: every feed-forward is dense")
    every_n_layers: int = _field(1, "every n-th layer is a mixture, the others are dense")
    first_dense_layers: int = _field(0, "layers at the bottom that stay dense")
    width_multiplier: float = _field(
        1.0, "width inside an expert, as a multiple of the dense hidden width"
    )
    dispatcher: Literal["all_to_all", "hierarchical"] = _field(
        "all_to_all",
        "how tokens travel with parallel.ep above 1: straight to their rank, or once to its node",
    )
    dispatch_chunks: int = _field(
        1, "parts of a micro-batch's tokens, so that one travels while another is computed"
    )

    def __post_init__(self) -> None:
        raise_problems("", _problems(self))

    def is_mixture(self, layer: int) -> bool:
        """True when this layer's feed-forward is a mixture; counted from 0."""
        above = layer - self.first_dense_layers
        return self.num_experts > 0 and above >= 0 and above % self.every_n_layers == 0

    def layer_config(self, dim: int, dense_hidden_dim: int) -> MoEConfig:
        """The layer's own configuration: router losses join the gradient, the rest as given."""
        same = {f.name: getattr(self, f.name) for f in dataclasses.fields(MoEOptions)}
        hidden = max(1, round(dense_hidden_dim * self.width_multiplier))
        return MoEConfig(
            dim=dim, hidden_dim=hidden, num_experts=self.num_experts, aux="attach", **same
        )


def _problems(c: MoESection) -> Iterator[Problem]:
    least = {"num_experts": 0, "every_n_layers": 1, "dispatch_chunks": 1, "first_dense_layers": 0}
    for name, low in least.items():
        if getattr(c, name) < low:
            yield Problem(name, "range", getattr(c, name), f"must be at least {low}", f"use {low}")
    if not 0 < c.width_multiplier < float("inf"):
        fix = "use 1.0, or 0.25 for fine-grained experts"
        yield Problem("width_multiplier", "range", c.width_multiplier, "must be above 0", fix)
    if c.num_experts >= 1:
        try:
            c.layer_config(1, 1)  # widths come from the model, which checks them
        except ValueError as error:
            yield from problems_of(error)
