"""Tokens and labels further ahead than the next one, of whole rows: shifted before they are cut over ranks.

Shapes: B rows, S tokens, K depths.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from forge_parallel.protocols import BatchLike

#: The label that losses leave out.
IGNORED = -100


class FurtherAhead(NamedTuple):
    """tokens (B, K, S), 0 where the row ends; targets: labels and weights (or None) of depth 1, 2, ..., (B, S) each."""

    tokens: Tensor
    targets: tuple[Tensor | None, ...]


def further_ahead(batch: BatchLike, depths: int) -> FurtherAhead:
    """What K modules of multi-token prediction read and predict: at depth k, token i + k and the label of i + k.

    A label counts where it is in the document of i, as `batch.document_ids` says (a change of id is a border);
    elsewhere it is IGNORED. Costs a copy of (B, S) booleans per depth to the device if the ids are on the host.
    """
    number = _document_numbers(getattr(batch, "document_ids", None))
    weights, tokens, targets = batch.weights, [], []
    for k in range(1, depths + 1):
        labels = F.pad(batch.labels[:, k:], (0, k), value=IGNORED)
        if number is not None:
            other = F.pad(number[:, k:] != number[:, :-k], (0, k), value=True)
            labels = labels.masked_fill(other.to(labels.device, non_blocking=True), IGNORED)
        tokens.append(F.pad(batch.tokens[:, k:], (0, k)))
        targets += [labels, None if weights is None else F.pad(weights[:, k:], (0, k))]
    return FurtherAhead(torch.stack(tokens, dim=1), tuple(targets))


def _document_numbers(ids: Tensor | None) -> Tensor | None:
    """Counts documents in each row (B, S): ids themselves may come again."""
    if ids is None:
        return None
    return F.pad((ids[:, 1:] != ids[:, :-1]).cumsum(1), (1, 0))
