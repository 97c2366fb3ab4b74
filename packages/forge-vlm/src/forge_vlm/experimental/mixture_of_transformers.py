"""Blocks with weights of each modality around one attention over all tokens (arXiv 2411.04996, Algorithm 1).

Shapes: B sequences, S tokens, N = B S, n tokens of a modality, D width of the stream, H heads, K key/value heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from forge_core import TokenContext
from forge_core.flops import spared_flops
from forge_core.model import Block
from forge_vlm.experimental.routing import routes_of

__all__ = ["MixtureBlock"]


class MixtureBlock(nn.Module):
    """A block for each modality, of which the tokens attend to each other: (B, S, D) -> (B, S, D).

        MixtureBlock(text_block, {"image": image_block}, groups=(0, 0, 1))

    Projections, norms and feed-forward are those of a token's modality; queries, keys and values of all tokens meet in
    their order in one attention, that of the text block. `text` is a block of a dense model, whose children are this
    module's, by their names; `towers` are blocks of the same kind for the other modalities, below `towers`. `groups`
    as in `routes_of`: padding goes the way of text.

    Cost: the products of a dense block for each token, four gathers of rows, one host sync per forward for all layers
    where modality ids lie on an accelerator. Towers without tokens run on none, and get gradients of zero.
    """

    def __init__(self, text: Block, towers: Mapping[str, Block], groups: tuple[int, ...]) -> None:
        super().__init__()
        self.norms, self.residual_scale = text.norms, text.residual_scale
        for name, child in text.named_children():
            self.add_module(name, child)
        self.towers = nn.ModuleDict(towers)
        self.groups = groups

    def forward(self, x: Tensor, ctx: TokenContext, cache: Any = None) -> Tensor:
        routes = routes_of(ctx, self.groups)
        towers: list[Any] = [self, *self.towers.values()]
        rows = routes.split(x.flatten(0, 1))  # (n, D) each
        projected = [
            tower.mixer.project(_normed(tower, "mixer_norm", part))
            for tower, part in zip(towers, rows)
        ]
        heads = []

        for parts in zip(*projected):  # queries, keys, values: (n, H or K, width) each
            whole = routes.join([part.flatten(1) for part in parts])
            heads.append(whole.unflatten(-1, parts[0].shape[1:]).unflatten(0, x.shape[:2]))
        mixer: Any = self.mixer
        seen = mixer.between(x, *heads, ctx, cache)  # (B, S, H * width)
        mixed = routes.split(seen.flatten(0, 1))
        out = [self._behind(*each) for each in zip(towers, rows, mixed)]
        return routes.join(out).unflatten(0, x.shape[:2])

    def _behind(self, tower: Any, rows: Tensor, mixed: Tensor) -> Tensor:
        """Output projection and feed-forward of one modality: rows (n, D) and what they saw."""
        added = _normed(tower, "mixer_post_norm", tower.mixer.o_proj(mixed))
        rows = rows + self._scaled(added)
        fed = tower.feed_forward(_normed(tower, "feed_forward_norm", rows))
        return rows + self._scaled(_normed(tower, "feed_forward_post_norm", fed))

    def _scaled(self, branch: Tensor) -> Tensor:
        return branch if self.residual_scale == 1.0 else branch * self.residual_scale

    def prepare(self, ctx: TokenContext, x: Tensor, cache: Any = None) -> None:
        """Find routes and rotary tables, once for all layers."""
        routes_of(ctx, self.groups)
        mixer: Any = self.mixer
        mixer.prepare(ctx, x, cache)

    def warm_sources(self) -> dict[str, tuple[str, ...]]:
        """{parameter: the one of the text tower that it begins as a copy of}, for `warm_start`."""
        return {
            f"towers.{name}.{own}": (own,)
            for name, tower in self.towers.items()
            for own, _ in tower.named_parameters()
        }

    def parallel_roles(self) -> dict[str, Any]:
        """A copy on each rank of tensor parallelism, which sees full tokens: rows of a modality are no fixed slice."""
        return {"*": "opaque"}

    def flops_per_token(self, seq_len: int) -> float:
        """Forward FLOPs for one token: those of a dense block, as each token meets one tower."""
        parts: tuple[Any, ...] = (self.mixer, self.feed_forward)
        return sum(part.flops_per_token(seq_len) for part in parts)

    def spared_flops_per_token(self, seq_len: int) -> float:
        """FLOPs of the backward that frozen matrices spare one token: those of the tower where they are fewest."""
        own = [child for name, child in self.named_children() if name != "towers"]
        towers = [own, *([tower] for tower in self.towers.values())]
        return min(sum(spared_flops(part, seq_len) for part in tower) for tower in towers)


def _normed(tower: Any, name: str, rows: Tensor) -> Tensor:
    """Rows after a norm, where the tower has one of this name."""
    norm = getattr(tower, name, None)
    out: Tensor = rows if norm is None else norm(rows)
    return out
