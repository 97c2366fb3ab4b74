"""Options of sources in formats of other projects, which say nothing of documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from forge_data._shared.problems import Problem, raise_problems

__all__ = ["BorderConfig"]

#: Formats of token ids that are read where they are.
RAW_KINDS = ("megatron", "nanogpt", "npy")
_LAST_ID = 2**31 - 1


@dataclass(frozen=True)
class BorderConfig:
    """Which id stands between documents; without one all is one document. `BorderConfig(eos_id=50256)`."""

    eos_id: int | None = None
    """id that ends each document (nanoGPT: 50256)"""
    bos_id: int | None = None
    """id that begins each document (llm.c, modded-nanogpt: 50256)"""

    def __post_init__(self) -> None:
        raise_problems("source", self._problems())

    def _problems(self) -> Iterator[Problem]:
        for name, value in vars(self).items():
            good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LAST_ID
            if value is not None and not good:
                rule = f"must be an id from 0 to {_LAST_ID}"
                yield Problem(name, "range", value, rule, "give the one of the tokenizer")
        if self.eos_id is not None and self.bos_id is not None:
            rule = f"must not be given with bos_id {self.bos_id}: each sets where documents begin"
            yield Problem("eos_id", "excludes", self.eos_id, rule, "remove one of them")


def raw_problems(config: Any) -> Iterator[Problem]:
    """Problems of a source of one of these formats, without those of its table."""
    name = config.name
    if name not in RAW_KINDS:
        return
    if not config.path:
        rule = f"must name files of {name} when name is {name!r}"
        yield Problem("path", "missing", config.path, rule, "set path")
    if config.dtype is not None and name != "nanogpt":
        rule = f"must not be given when name is {name!r}, whose files contain it"
        yield Problem("dtype", "excludes", config.dtype, rule, "remove dtype")
    if config.verify != "touch":
        rule = f"must be 'touch' when name is {name!r}, which has no digests"
        yield Problem("verify", "excludes", config.verify, rule, "remove verify")
