"""[eval]: held-out rows, questions with choices, questions with pictures, and when they are asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

from forge_data import SourceConfig
from forge_train._shared.fields import Checked, field
from forge_train._shared.problems import Problem

__all__ = ["VALIDATION", "ChoicesConfig", "EvalConfig", "EvalSetConfig"]

#: The name of [data.validation] among the sets.
VALIDATION = "validation"
#: Names of sources of conversations with images.
KINDS = ("vlm", "forge_vlm.data:open_source")
_STEPS, _ROWS = (0, 10**9), (1, 2**20)


@dataclass(frozen=True)
class EvalSetConfig(SourceConfig, Checked):
    """Held-out rows beside [data.validation]: the keys of a source, and how many of its rows are read when."""

    sequences: int | None = field(None, between=_ROWS)
    """rows per evaluation, always the first ones (default: eval.sequences)"""
    every_steps: int | None = field(None, between=_STEPS)
    """steps between its evaluations; 0: at the last step only (default: eval.every_steps)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        Checked.__post_init__(self)


@dataclass(frozen=True)
class ChoicesConfig(Checked):
    """Questions with several answers, the likeliest of which is the model's: {"prompt", "choices", "answer"} a line."""

    path: str | None = None
    """JSON lines: a prompt, its choices (texts that follow it), and the number of the right one, from 0"""
    samples: int = field(64, between=_ROWS)
    """questions per evaluation, always the first ones of the file"""
    every_steps: int | None = field(None, between=_STEPS)
    """steps between its evaluations; 0: at the last step only (default: eval.every_steps)"""

    def _problems(self) -> Iterator[Problem]:
        if not self.path:
            yield Problem("path", "missing", self.path, "must name a file of questions")


@dataclass(frozen=True)
class ExactMatchConfig(Checked):
    """The share of questions whose greedily generated answer is that of the file."""

    path: str | None = None
    """questions with pictures and their answers; none: no such evaluation"""
    format: Literal["chat", "llava", "coco", "folder", "parquet", "dataset", "webdataset"] = "chat"
    """format of the file, as of a source of conversations with pictures"""
    source: str | None = None
    """source of [data.sources] whose template, tokenizer and resolution prompts are written with (default: the
    first of name vlm)"""
    samples: int = field(64, between=_ROWS)
    """questions per evaluation, always the first ones of the file"""
    max_new_tokens: int = field(8, between=_ROWS)
    """longest answer, its end token counted, in tokens"""
    rows: int = field(8, between=_ROWS)
    """questions that are answered at once"""
    normalise: Literal["none", "strip", "words"] = "strip"  # language: key of TOML files
    """of both answers before they are compared: nothing, white space at the ends, or also case, punctuation and
    runs of white space"""

    def _problems(self) -> Iterator[Problem]:
        rule, fix = "is set without path, which names the questions", "give path, or remove it"
        for f in fields(self) if self.path is None else ():
            if getattr(self, f.name) != f.default:
                yield Problem(f.name, "requires", getattr(self, f.name), rule, fix)


@dataclass(frozen=True)
class EvalConfig(Checked):
    """Evaluations of a run: the loss of held-out rows, and answers to questions."""

    every_steps: int = field(100, between=_STEPS)
    """steps between evaluations; one more follows the last step; 0: never"""
    at_start: bool = False
    """evaluate the model before its first step, too, as step 0"""
    sequences: int = field(64, between=_ROWS)
    """sequences of data.validation per evaluation, always the same ones"""
    sets: dict[str, EvalSetConfig] = field(dict)
    """further held-out rows, by name: eval/NAME/loss"""
    choices: dict[str, ChoicesConfig] = field(dict)
    """questions with several answers, by name: eval/NAME/accuracy"""
    exact_match: ExactMatchConfig = field(ExactMatchConfig)
    """questions that the model answers at each evaluation: eval/exact_match"""

    def _problems(self) -> Iterator[Problem]:
        for name in sorted({*self.sets} & {*self.choices}):
            rule = f"has the name of choices.{name}, and metrics have one eval/{name}"
            yield Problem(f"sets.{name}", "duplicate", ..., rule, "rename one")
        for table in (key for key in ("sets", "choices") if VALIDATION in getattr(self, key)):
            rule = "has the name of [data.validation]"
            yield Problem(f"{table}.{VALIDATION}", "validation", ..., rule, "rename it")

    def interval(self, own: int | None) -> int:
        """Steps between evaluations of a set or of questions; 0: at the last step alone."""
        return self.every_steps if own is None else own
