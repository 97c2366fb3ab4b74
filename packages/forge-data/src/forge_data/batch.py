"""What a training step gets.

B   rows        S   tokens in a row
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

IGNORE = -100  # label of a position with nothing to learn
PAD_DOCUMENT = -1
FILLER_INSTANCE = -1  # id of a row that is no instance of any stream


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of packed documents. Labels are already shifted: `labels[t]` follows `tokens[t]`.

    Usage: `for part in batch.split(4): loss = model(part.to(device).tokens, ...)`.
    """

    tokens: torch.Tensor  # (B, S) int64; 0 on padding
    labels: torch.Tensor  # (B, S) int64; -100 on a document's last token and on padding
    positions: torch.Tensor  # (B, S) int64; from 0 in each document's part of the row
    document_ids: torch.Tensor  # (B, S) int64; from 0 in each row, -1 on padding
    instance_ids: torch.Tensor  # (B,) int64; -1 on filler
    digest: str  # 16 hex digits of the *global* batch's instance ids, the same on all ranks
    num_valid: int = -1  # labels that are not -100; counted from the labels unless given

    def __post_init__(self) -> None:
        if self.num_valid < 0:
            object.__setattr__(self, "num_valid", int((self.labels != IGNORE).sum()))

    def split(self, micro_batch: int) -> list[Batch]:
        """Parts of `micro_batch` rows, in order; views, no copy.

        Each counts its own labels, so split on the host, before `to`. Raises ValueError unless
        `micro_batch` divides the rows.
        """
        rows = len(self.tokens)
        if micro_batch < 1 or rows % micro_batch:
            raise ValueError(
                f"micro_batch {micro_batch} must divide the {rows} rows of the batch; "
                f"use {max(d for d in range(1, rows + 1) if rows % d == 0 and d <= max(micro_batch, 1))}"
            )
        return [
            Batch(
                **{name: getattr(self, name)[i : i + micro_batch] for name in _TENSORS},
                digest=self.digest,
            )
            for i in range(0, rows, micro_batch)
        ]

    def to(self, device: torch.device | str) -> Batch:
        """The batch on `device`. To CUDA it goes through pinned memory and does not wait."""
        device = torch.device(device)

        def move(tensor: torch.Tensor) -> torch.Tensor:
            if device.type == "cuda" and tensor.device.type == "cpu":
                return tensor.pin_memory().to(device, non_blocking=True)
            return tensor.to(device)

        return Batch(
            tokens=move(self.tokens),
            labels=move(self.labels),
            positions=move(self.positions),
            document_ids=move(self.document_ids),
            instance_ids=move(self.instance_ids),
            digest=self.digest,
            num_valid=self.num_valid,
        )

    def followed_by(self, other: Batch) -> Batch:
        """These rows and then the rows of `other`, under this batch's digest; a copy."""
        tensors = {
            name: torch.cat([getattr(self, name), getattr(other, name)]) for name in _TENSORS
        }
        return Batch(**tensors, digest=self.digest, num_valid=self.num_valid + other.num_valid)


_TENSORS = tuple(f.name for f in fields(Batch) if f.name not in ("digest", "num_valid"))


def filler_batch(rows: int, seq_len: int) -> Batch:
    """Rows (B, S) that keep a rank in step with the others and teach nothing: all padding, no label.

    A model attends them to themselves, a router sends them nowhere, no count includes them. They fill
    the last micro-batches of a rank that has fewer rows than another, a rank that cannot read its
    data, and evaluations whose rows do not divide. The digest is zero.
    """
    zeros = torch.zeros(rows, seq_len, dtype=torch.int64)
    return Batch(
        tokens=zeros,
        labels=torch.full_like(zeros, IGNORE),
        positions=zeros,
        document_ids=torch.full_like(zeros, PAD_DOCUMENT),
        instance_ids=torch.full((rows,), FILLER_INSTANCE),
        digest="0" * 16,
        num_valid=0,
    )
