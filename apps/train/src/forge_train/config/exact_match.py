"""[eval.exact_match]: questions with short answers that the model writes by itself at each evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

from forge_train._shared.fields import Checked, field
from forge_train._shared.problems import Problem

KINDS = ("vlm", "forge_vlm.data:open_source")
_COUNT = (1, 2**20)


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
    samples: int = field(64, between=_COUNT)
    """questions per evaluation, always the first ones of the file"""
    max_new_tokens: int = field(8, between=_COUNT)
    """longest answer, its end token counted, in tokens"""
    rows: int = field(8, between=_COUNT)
    """questions that are answered at once"""
    normalise: Literal["none", "strip", "words"] = "strip"
    """of both answers before they are compared: nothing, white space at the ends, or also case, punctuation and
    runs of white space"""

    def _problems(self) -> Iterator[Problem]:
        rule, fix = "is set without path, which names the questions", "give path, or remove it"
        for f in fields(self) if self.path is None else ():
            if getattr(self, f.name) != f.default:
                yield Problem(f.name, "requires", getattr(self, f.name), rule, fix)
