"""[eval]: held-out rows, questions with choices, questions with pictures, and when they are asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from forge_data import SourceConfig
from forge_train._shared.problems import Problem, raise_problems
from forge_train.config.exact_match import ExactMatchConfig
from forge_train.config.ranges import range_problems

__all__ = ["VALIDATION", "ChoicesConfig", "EvalConfig", "EvalSetConfig", "evaluation_problems"]

#: The name of [data.validation] among the sets.
VALIDATION = "validation"
_MAX_STEPS = 10**9
_MAX_ROWS = 2**20


def _field(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class EvalSetConfig(SourceConfig):
    """Held-out rows beside [data.validation]: the keys of a source, and how many of its rows are read when."""

    sequences: int | None = _field(
        None, "rows per evaluation, always the first ones (default: eval.sequences)"
    )
    every_steps: int | None = _field(
        None, "steps between its evaluations; 0: at the last step alone (default: eval.every_steps)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        sequences = range_problems(self, 1, _MAX_ROWS, "sequences")
        raise_problems("", [*sequences, *range_problems(self, 0, _MAX_STEPS, "every_steps")])


@dataclass(frozen=True)
class ChoicesConfig:
    """Questions with several answers, the likeliest of which is the model's: {"prompt", "choices", "answer"} a line."""

    path: str | None = _field(
        None,
        "JSON lines: a prompt, its choices (texts that follow it), and the number of the right one, from 0",
    )
    samples: int = _field(64, "questions per evaluation, always the first ones of the file")
    every_steps: int | None = _field(
        None, "steps between its evaluations; 0: at the last step alone (default: eval.every_steps)"
    )

    def __post_init__(self) -> None:
        raise_problems("", self._problems())

    def _problems(self) -> Iterator[Problem]:
        if not self.path:
            yield Problem("path", "missing", self.path, "must name a file of questions")
        yield from range_problems(self, 1, _MAX_ROWS, "samples")
        yield from range_problems(self, 0, _MAX_STEPS, "every_steps")


@dataclass(frozen=True)
class EvalConfig:
    """Evaluations of a run: the loss of held-out rows, and answers to questions."""

    every_steps: int = _field(
        100, "steps between evaluations; one more follows the last step; 0: never"
    )
    at_start: bool = _field(False, "evaluate the model before its first step, too, as step 0")
    sequences: int = _field(64, "sequences of data.validation per evaluation, always the same ones")
    sets: dict[str, EvalSetConfig] = field(
        default_factory=dict, metadata={"help": "further held-out rows, by name: eval/NAME/loss"}
    )
    choices: dict[str, ChoicesConfig] = field(
        default_factory=dict,
        metadata={"help": "questions with several answers, by name: eval/NAME/accuracy"},
    )
    exact_match: ExactMatchConfig = field(
        default_factory=ExactMatchConfig,
        metadata={"help": "questions that the model answers at each evaluation: eval/exact_match"},
    )

    def __post_init__(self) -> None:
        raise_problems("", self._problems())

    def _problems(self) -> Iterator[Problem]:
        yield from range_problems(self, 0, _MAX_STEPS, "every_steps")
        yield from range_problems(self, 1, _MAX_ROWS, "sequences")
        yield from _named_twice(self.sets, self.choices)

    def interval(self, own: int | None) -> int:
        """Steps between evaluations of a set or of questions; 0: at the last step alone."""
        return self.every_steps if own is None else own


def evaluation_problems(config: Any) -> Iterator[Problem]:
    """Parts of a job's evaluations that no step would read."""
    asked = config.eval
    if asked.every_steps:
        return
    given = [f"eval.sets.{name}" for name in asked.sets]
    given += [f"eval.choices.{name}" for name in asked.choices]
    given += ["eval.at_start"] if asked.at_start else []
    rule, fix = "is given but eval.every_steps 0 never evaluates", "set eval.every_steps = 100"
    yield from (Problem(key, "never_read", ..., rule, f"{fix}, or remove it") for key in given)


def _named_twice(
    sets: Mapping[str, EvalSetConfig], choices: Mapping[str, ChoicesConfig]
) -> Iterator[Problem]:
    for name in sorted({*sets} & {*choices}):
        rule = f"has the name of choices.{name}, and metrics have one eval/{name}"
        yield Problem(f"sets.{name}", "duplicate", ..., rule, "rename one")
    for table in (t for t, own in (("sets", sets), ("choices", choices)) if VALIDATION in own):
        rule = "has the name of [data.validation]"
        yield Problem(f"{table}.{VALIDATION}", "validation", ..., rule, "rename it")
