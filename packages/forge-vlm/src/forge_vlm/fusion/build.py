"""The submodules of a transformer that a fusion replaces, by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from forge_core.model import build_block, build_feed_forward, build_mixer
from forge_vlm._shared.problems import invalid
from forge_vlm.experimental.mixture_of_transformers import MixtureBlock
from forge_vlm.experimental.moma import MoMa
from forge_vlm.experimental.routing import NOWHERE
from forge_vlm.fusion.config import groups_of
from forge_vlm.modalities import numbers

if TYPE_CHECKING:
    from forge_vlm.config import VLMConfig

__all__ = ["fusion_parts"]

#: Factories whose parts a fusion builds itself.
_REPLACED: dict[str, tuple[str, ...]] = {
    "mixture_of_transformers": ("mixer", "feed_forward", "block"),
    "moma": ("feed_forward", "block"),
}
Factory = Callable[[int], nn.Module]
ExpertFactory = Callable[[str, int], nn.Module]


def fusion_parts(
    config: VLMConfig, given: dict[str, Factory | None], experts: ExpertFactory | None
) -> dict[str, Factory | None]:
    """`given` factories (mixer, feed_forward, block) of a Transformer with those of the fusion in their place.

    ValueError where a factory would build what the fusion builds, and for experts without groups of them.
    """
    name = config.fusion.name
    if experts is not None and name != "moma":
        rule = f"must be left out with fusion {name!r}, which has none"
        raise invalid("experts", "fusion", experts, rule, "use moma")
    for key in _REPLACED.get(name, ()):
        if given[key] is not None:
            rule = f"must be left out with fusion {name!r}, which builds its own"
            raise invalid(key, "built_in", given[key], rule, "use another fusion")
    if name == "mixture_of_transformers":
        return {"block": lambda layer: _mixture(config, layer)}
    if name == "moma":
        return {**given, "feed_forward": lambda layer: _moma(config, layer, experts)}
    return given


def _mixture(config: VLMConfig, layer: int) -> nn.Module:
    built = config.as_standard()
    share = config.fusion.mixture_of_transformers.share
    names, owner = groups_of(list(config.modalities), share)

    def block() -> Any:
        return build_block(built, build_mixer(built, layer), build_feed_forward(built, layer))

    return MixtureBlock(block(), {n: block() for n in names[1:]}, _table(config, names, owner, 0))


def _moma(config: VLMConfig, layer: int, experts: ExpertFactory | None) -> nn.Module:
    names, owner = groups_of(list(config.modalities), config.fusion.moma.share)
    built, table = config.as_standard(), _table(config, names, owner, NOWHERE)
    return MoMa(built, layer, names, table, experts)


def _table(
    config: VLMConfig, names: tuple[str, ...], owner: dict[str, str], padding: int
) -> tuple[int, ...]:
    """The group of padding, of text and of each modality by number."""
    return (padding, 0, *(names.index(owner[name]) for name in numbers(config.modalities)))
