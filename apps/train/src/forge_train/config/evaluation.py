"""[eval]: held-out rows, questions with choices, questions with pictures, and when they are asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from forge_data import SourceConfig
from forge_train.config.exact_match import ExactMatchConfig

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
        _require([*_ranges(self, "sequences", 1), *_ranges(self, "every_steps", 0)])


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
        missing = [] if self.path else ["path must name a file of questions"]
        _require([*missing, *_ranges(self, "samples", 1), *_ranges(self, "every_steps", 0)])


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
        _require(
            [
                *_ranges(self, "every_steps", 0),
                *_ranges(self, "sequences", 1),
                *_named_twice(self.sets, self.choices),
            ]
        )

    def interval(self, own: int | None) -> int:
        """Steps between evaluations of a set or of questions; 0: at the last step alone."""
        return self.every_steps if own is None else own


def evaluation_problems(config: Any) -> Iterator[str]:
    """Parts of a job's evaluations that nothing would ever read."""
    asked = config.eval
    if asked.every_steps:
        return
    given = [f"eval.sets.{name}" for name in asked.sets]
    given += [f"eval.choices.{name}" for name in asked.choices]
    given += ["eval.at_start"] if asked.at_start else []
    for key in given:
        yield (
            f"{key} is given but eval.every_steps 0 never evaluates; set eval.every_steps = 100, or remove it"
        )


def _named_twice(
    sets: Mapping[str, EvalSetConfig], choices: Mapping[str, ChoicesConfig]
) -> Iterator[str]:
    for name in sorted({*sets} & {*choices}):
        yield f"sets.{name} and choices.{name} have one name; rename one, as eval/{name} is in metrics"
    for table in (t for t, own in (("sets", sets), ("choices", choices)) if VALIDATION in own):
        yield f"{table}.{VALIDATION} has the name of [data.validation]; rename it"


def _ranges(config: Any, name: str, low: int) -> Iterator[str]:
    value, high = getattr(config, name), _MAX_STEPS if name == "every_steps" else _MAX_ROWS
    if value is not None and not low <= value <= high:
        fix = f"{low} or more" if value < low else "fewer zeros"
        yield f"{name} {value} must be from {low} to {high}; use {fix}"


def _require(problems: list[str]) -> None:
    if problems:
        raise ValueError("\n".join(problems))
