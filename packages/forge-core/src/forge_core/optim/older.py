"""What an older run does otherwise from now on: versions before took stacks of vectors for matrices (F146)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn

from forge_core.kinds import stacked_vectors
from forge_core.optim.config import OptimizerConfig
from forge_core.optim.groups import lr_scales, match_groups
from forge_core.optim.muon import hidden_matrices, in_block

__all__ = ["changes_of_older_run"]

_NUMBER = re.compile(r"(?:(?<![^.])|(?<=\.cross_))\d+(?=\.)")  # of a layer


def changes_of_older_run(model: nn.Module, config: OptimizerConfig) -> list[str]:
    """Lines that name trainable norms, biases and vectors in stacks whose decay, optimizer or rate is another one now.

    `model` is the whole model. Empty where nothing changed. Usage: `changes_of_older_run(model, OptimizerConfig("muon"))`.
    """
    owners, shapes = match_groups(model, config.groups), dict(model.named_parameters())
    own = {n: config.groups.get(owners.get(n, "")) for n in sorted(stacked_vectors(model))}
    decayed = [n for n, group in own.items() if group is None or group.weight_decay is None]
    orthogonalized = [
        name
        for name, group in own.items()
        if shapes[name].ndim in (2, 3) and not name.endswith("bias")
        if (in_block(name) if group is None or group.muon is None else group.muon)
    ]
    scales = lr_scales(model, config)

    lines = []
    if decayed and config.weight_decay:
        decay = f"weight_decay = {config.weight_decay:g}"
        keep = f"an [optimizer.groups] table with these patterns and {decay} keeps it"
        lines.append(f"{_patterns(decayed)} had {decay}, and now do not decay: {keep}")
    if orthogonalized and config.name == "muon":
        lines.append(f"{_patterns(orthogonalized)} were trained by Muon, and now are by AdamW with new moments")  # fmt: skip
    crossed = [
        name
        for name in shapes
        if ".cross_" in name
        and getattr(config.groups.get(owners.get(name, "")), "muon", None) is None
    ]
    if config.name == "muon" and crossed and (new := hidden_matrices(model, config) & {*crossed}):
        lines.append(f"{_patterns(sorted(new))} were trained by AdamW, and now are by Muon with new moments")  # fmt: skip
    if scaled := [n for n in own if n in scales and len(set(scales.values())) > 1]:
        lines.append(f"{_patterns(scaled)} had the learning rate of matrices of this width, and now have that of vectors")  # fmt: skip
    return lines


def _patterns(names: Iterable[str]) -> str:
    """Patterns of the names, one for all layers."""
    return ", ".join(dict.fromkeys(_NUMBER.sub("*", name) for name in names))
