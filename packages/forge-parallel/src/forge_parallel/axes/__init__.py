"""One file for each way of sharding a model over ranks."""

import importlib
from typing import TYPE_CHECKING, Any

from forge_parallel._renamed import renamed

if TYPE_CHECKING:
    from forge_parallel.axes.context import (
        arguments_with_positions,
        context_parallel,
        gather_sequence,
        shard_sequence,
    )
    from forge_parallel.axes.fsdp import accumulate, apply_fsdp, follow_requires_grad, reshard
    from forge_parallel.axes.roles import find_roles
    from forge_parallel.axes.tensor import (
        gather_vocab,
        sharded_logits_vocab_size,
        sharded_logits_width,
        tensor_parallel,
    )
    from forge_parallel.axes.vocab import (
        VOCAB_LOSSES,
        VocabLoss,
        vocab_cross_entropy,
        vocab_fused_cross_entropy,
    )

__all__ = [
    "VOCAB_LOSSES",
    "VocabLoss",
    "accumulate",
    "apply_fsdp",
    "arguments_with_positions",
    "context_parallel",
    "find_roles",
    "follow_requires_grad",
    "gather_sequence",
    "gather_vocab",
    "reshard",
    "shard_sequence",
    "sharded_logits_vocab_size",
    "sharded_logits_width",
    "tensor_parallel",
    "vocab_cross_entropy",
    "vocab_fused_cross_entropy",
]

# Modules are imported at first use: some import torch.distributed.tensor, which takes half a second.
_NAMES = {
    "context": "arguments_with_positions context_parallel gather_sequence shard_sequence",
    "fsdp": "accumulate apply_fsdp follow_requires_grad reshard",
    "roles": "find_roles",
    "tensor": "gather_vocab sharded_logits_vocab_size sharded_logits_width tensor_parallel",
    "vocab": "VOCAB_LOSSES VocabLoss vocab_cross_entropy vocab_fused_cross_entropy",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    return renamed(__name__, name, stacklevel=3)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
