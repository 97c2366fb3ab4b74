"""One file for each way of sharding a model over ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any

from forge_parallel._renamed import renamed
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
from forge_parallel.axes.vocab import VocabLoss, vocab_cross_entropy, vocab_fused_cross_entropy

#: Losses where each tp rank has a part of the logits, or of the head's weight, by the names of their unsharded forms.
VOCAB_LOSSES: dict[str, Callable[..., Any]] = {
    "cross_entropy": vocab_cross_entropy,
    "fused_cross_entropy": vocab_fused_cross_entropy,
}

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

__getattr__ = partial(renamed, __name__)
