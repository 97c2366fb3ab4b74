"""Options of sources in formats of other projects, which say nothing of documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from forge_data._problems import raise_problems

__all__ = ["BorderConfig"]

#: Formats of token ids that are read where they are.
RAW_KINDS = ("megatron", "nanogpt", "npy")
_LAST_ID = 2**31 - 1


@dataclass(frozen=True)
class BorderConfig:
    """Which id stands between documents; without one all is one document. `BorderConfig(eos_id=50256)`."""

    eos_id: int | None = field(
        default=None, metadata={"help": "id that ends each document (nanoGPT: 50256)"}
    )
    bos_id: int | None = field(
        default=None,
        metadata={"help": "id that begins each document (llm.c, modded-nanogpt: 50256)"},
    )

    def __post_init__(self) -> None:
        raise_problems("source", self._problems())

    def _problems(self) -> Iterator[str]:
        for name, value in vars(self).items():
            good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LAST_ID
            if value is not None and not good:
                yield f"{name} {value!r:.40} must be an id from 0 to {_LAST_ID}; give the one of the tokenizer"
        if self.eos_id is not None and self.bos_id is not None:
            yield (
                f"eos_id {self.eos_id} and bos_id {self.bos_id} each say where documents are apart; remove one of them"
            )


def raw_problems(config: Any) -> Iterator[str]:
    """Problems of a source of one of these formats, beside those of its table."""
    if config.name not in RAW_KINDS:
        return
    if not config.path:
        yield f"path {config.path!r} must name files of {config.name} when name is {config.name!r}; set path"
    if config.dtype is not None and config.name != "nanogpt":
        yield f"dtype {config.dtype!r} means nothing when name is {config.name!r}, whose files say it; remove dtype"
    if config.verify != "touch":
        yield (
            f"verify {config.verify!r} means nothing when name is {config.name!r}, which has no digests; remove verify"
        )
