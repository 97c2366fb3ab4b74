"""Optional features of a run, which the training loop does not know."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from forge_train.config.schema import JobConfig
from forge_train.extensions.adapters import Adapters
from forge_train.extensions.experts import Experts
from forge_train.extensions.gradients import Gradients
from forge_train.extensions.health import Health
from forge_train.extensions.profile import Profile
from forge_train.extensions.replicas import Replicas
from forge_train.extensions.stages import FreezingStages
from forge_train.run.extension import Extension

#: All kinds in the order of their calls (`Extension` says which hooks reverse it). None: those of users.
ORDER = (Adapters, Replicas, Profile, None, FreezingStages, Experts, Gradients, Health)


def extensions_of(
    config: JobConfig, model: nn.Module, users: Sequence[Extension]
) -> list[Extension]:
    """The extensions that a job needs, and those of users. `model` is not sharded yet."""
    found: list[Extension] = []
    for kind in ORDER:
        if kind is None:
            found += users
        elif (extension := kind.of(config, model)) is not None:
            found.append(extension)
    return found
