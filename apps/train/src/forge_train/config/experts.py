"""[model.moe]: the feed-forwards that are mixtures of experts, and their configuration."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from forge_moe import MoEConfig
from forge_moe.config import MoEOptions


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
        problems = [
            f"{name} {value} must be at least {least}; use {least} or more"
            for name, value, least in (
                ("num_experts", self.num_experts, 0),
                ("every_n_layers", self.every_n_layers, 1),
                ("dispatch_chunks", self.dispatch_chunks, 1),
                ("first_dense_layers", self.first_dense_layers, 0),
            )
            if value < least
        ]
        if not 0 < self.width_multiplier < float("inf"):
            problems.append(
                f"width_multiplier {self.width_multiplier} must be above 0; use 1.0, or 0.25 for "
                "fine-grained experts"
            )
        if self.num_experts >= 1:
            problems += _problems_of(self)
        if problems:
            raise ValueError("\n".join(problems))

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


def _problems_of(section: MoESection) -> list[str]:
    """Problems of the layer's own keys; widths come from the model, which checks them."""
    try:
        section.layer_config(1, 1)
    except ValueError as error:
        return [line.partition(": ")[2] for line in str(error).splitlines()]
    return []
