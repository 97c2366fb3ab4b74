"""[eval.exact_match]: questions with short answers that the model writes by itself at each evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from forge_train._shared.problems import Problem, raise_problems
from forge_train.config.ranges import range_problems

KINDS = ("vlm", "forge_vlm.data:open_source")


def _field(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class ExactMatchConfig:
    """The share of questions whose greedily generated answer is that of the file."""

    path: str | None = _field(
        None, "questions with pictures and their answers; none: no such evaluation"
    )
    format: Literal["chat", "llava", "coco", "folder", "parquet", "dataset", "webdataset"] = _field(
        "chat", "format of the file, as of a source of conversations with pictures"
    )
    source: str | None = _field(
        None,
        "source of [data.sources] whose template, tokenizer and resolution prompts are written with (default: the "
        "first of name vlm)",
    )
    samples: int = _field(64, "questions per evaluation, always the first ones of the file")
    max_new_tokens: int = _field(8, "longest answer, its end token counted, in tokens")
    rows: int = _field(8, "questions that are answered at once")
    normalise: Literal["none", "strip", "words"] = _field(
        "strip",
        "of both answers before they are compared: nothing, white space at the ends, or also case, punctuation and "
        "runs of white space",
    )

    def __post_init__(self) -> None:
        raise_problems("", _problems(self))


def _problems(c: ExactMatchConfig) -> Iterator[Problem]:
    yield from range_problems(c, 1, 2**20, "samples", "max_new_tokens", "rows")
    rule, fix = "is set without path, which names the questions", "give path, or remove it"
    for f in fields(c) if c.path is None else ():
        if getattr(c, f.name) != f.default:
            yield Problem(f.name, "requires", getattr(c, f.name), rule, fix)
