"""The rows that a step saw, over all ranks, as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from forge_data.documents import documents_of
from forge_data.run_checks import tokenizer_of

if TYPE_CHECKING:
    from forge_data import Batch
    from forge_train import Trainer

_CHARACTERS = 60
_TOKENS = 40  # enough for so many characters


@dataclass(frozen=True)
class SeenRow:
    """An instance of a global batch: the name of its source, the numbers of its documents there (None where the source
    does not number them), and the first characters of each one's part of the row; ids without a tokenizer."""

    instance: int
    source: str
    documents: list[int] | None
    texts: list[str]


def seen_rows(trainer: Trainer, batch: Batch | None) -> list[SeenRow]:
    """The rows of a step, of all ranks, by instance; `batch` is what this rank read. Collective; call it on every rank."""
    own: list[dict[str, Any]] = []
    if batch is not None and trainer.meshes.is_batch_leader:
        names = list(trainer.config.data.sources)
        for row in documents_of(trainer.loader.stream, batch):
            source = names[0] if len(names) == 1 else row.source
            decode = _decoder(trainer, source)
            texts = [decode(tokens[:_TOKENS])[:_CHARACTERS] for tokens in row.tokens]
            documents = None if row.documents is None else list(row.documents)
            own.append(asdict(SeenRow(row.instance, source, documents, texts)))
    rows = [SeenRow(**row) for rank in trainer.run.agreement.exchange(own) for row in rank]
    return sorted(rows, key=lambda row: row.instance)


def _decoder(trainer: Trainer, source: str) -> Any:
    try:
        return tokenizer_of(trainer.config.data.sources[source]).decode
    except (KeyError, ValueError):  # ids without text
        return lambda ids: " ".join(map(str, ids))
