"""What `explain --parameters` prints: kind, weight decay and optimizer of each parameter of a job's model."""

from __future__ import annotations

from collections import Counter

from forge_core.kinds import parameter_kinds
from forge_core.optim import hidden_matrices, parameter_groups
from forge_train.config.schema import JobConfig
from forge_train.errors import config_errors
from forge_train.trainer.adapters import NUMBER
from forge_train.trainer.build import build_trained, freeze_groups

_HEAD = ("parameter", "number", "shape", "kind", "weight decay", "trained by")


def parameter_lines(config: JobConfig) -> list[str]:
    """A table with a row for parameters whose names differ in numbers of layers alone.

    Builds the model, on the meta device where it is a built-in one. ConfigError as a run, for what does not fit the model.
    """
    model, optimizer = build_trained(config), config.optimizer
    freeze_groups(model, config)
    with config_errors():
        kinds = parameter_kinds(model)
        hidden = hidden_matrices(model, optimizer) if optimizer.name == "muon" else set()
        groups = parameter_groups(model, optimizer, rounds=True)
    decays = {n: group["weight_decay"] for group in groups for n, _ in group["params"]}
    others = "adamw" if optimizer.name == "muon" else optimizer.name

    rows: Counter[tuple[str, ...]] = Counter()
    for name, parameter in model.named_parameters():
        decay, by = "", "none: frozen"
        if name in decays:
            decay, by = f"{decays[name]:g}", "muon" if name in hidden else others
        shape = " x ".join(map(str, parameter.shape)) or "1"
        rows[NUMBER.sub("*", name), shape, kinds[name], decay, by] += 1
    table = [_HEAD, *((name, str(number), *rest) for (name, *rest), number in rows.items())]
    widths = [max(map(len, column)) for column in zip(*table)]
    return ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths)).rstrip() for row in table]
