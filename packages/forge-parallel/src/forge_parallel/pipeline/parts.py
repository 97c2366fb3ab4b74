"""What a model says about its depth: the protocol that lets it be cut into stages."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn


class Parts(NamedTuple):
    """Names of direct children: before the blocks, the container of the blocks, behind them.

    A name in both `first` and `last` is tied: each of the two ends holds a copy of it.
    """

    first: tuple[str, ...]
    blocks: str
    last: tuple[str, ...]

    @property
    def tied(self) -> tuple[str, ...]:
        """What both ends hold."""
        return tuple(name for name in self.first if name in self.last)

    @property
    def ends(self) -> tuple[str, ...]:
        """All names but that of the blocks, each once."""
        return tuple(dict.fromkeys((*self.first, *self.last)))


def parts_of(model: nn.Module) -> Parts:
    """`model.pipeline_parts()`, checked against its children.

        def pipeline_parts(self):
            return {"first": ("embedding",), "blocks": "layers", "last": ("norm", "lm_head")}

    `blocks` names a ModuleDict, ModuleList or Sequential. The forward must skip children that are None
    and take the stream (B, S, D), floats, where it takes token ids otherwise; it may index no block by
    number. Raises ValueError, naming it, for a model without the method, for a name that is no child, for a
    child with parameters that no part names, and for parameters of the model itself.
    """
    kind, offer = type(model).__name__, getattr(model, "pipeline_parts", None)
    if not callable(offer):
        raise ValueError(
            f"{kind} must offer pipeline_parts() to be cut into pipeline stages, and has no such method; "
            "add it (see forge_parallel.pipeline.parts_of), or use pp 1"
        )
    said: Any = offer()
    parts = Parts(tuple(said["first"]), said["blocks"], tuple(said["last"]))
    children = model._modules
    unknown = [name for name in (*parts.ends, parts.blocks) if name not in children]
    if unknown or not isinstance(
        children[parts.blocks], nn.ModuleDict | nn.ModuleList | nn.Sequential
    ):
        raise ValueError(
            f"{kind}.pipeline_parts() names {', '.join(unknown) or parts.blocks}, which must be a child of "
            "it (blocks: a ModuleDict, ModuleList or Sequential); name attributes of the model"
        )
    own = [name for name, p in model._parameters.items() if p is not None]
    forgotten = [
        name
        for name, child in children.items()
        if child is not None and name not in (*parts.ends, parts.blocks)
        if any(True for _ in child.parameters())
    ]
    if own or forgotten:
        raise ValueError(
            f"{kind}: {', '.join(own + forgotten)} must belong to a stage, and pipeline_parts() names "
            "neither; put it into a module that `first` or `last` names"
        )
    return parts


def blocks_by_key(model: nn.Module, parts: Parts) -> dict[str, nn.Module]:
    """The blocks with their keys: global ones, also where a rank has only some."""
    container: Any = model._modules[parts.blocks]
    return dict(container._modules)
