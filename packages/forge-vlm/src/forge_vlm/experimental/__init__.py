"""Research parts without a published checkpoint to load, outside the stability promise of the other modules.

The fusions `moma` and `mixture_of_transformers`, and the attention of Chameleon. A minor version may change their names,
weights and numbers; TOML keys and metrics stay.
"""

from forge_vlm.experimental.chameleon import ChameleonAttention
from forge_vlm.experimental.mixture_of_transformers import MixtureBlock
from forge_vlm.experimental.moma import MoMa, MoMaSteps, set_routing_step, set_row_group

__all__ = [
    "ChameleonAttention",
    "MixtureBlock",
    "MoMa",
    "MoMaSteps",
    "set_routing_step",
    "set_row_group",
]
