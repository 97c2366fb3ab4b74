"""The share of questions with pictures that a model answers right, the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from forge_parallel import Meshes, reshard
from forge_resilience import Agreement
from forge_train._shared.problems import Problem, invalid
from forge_train.config.exact_match import KINDS
from forge_train.config.schema import JobConfig
from forge_train.config.tokenizer import ends_of_weights
from forge_train.errors import (
    ConfigError,
    DataError,
    config_errors,
    problems_under,
    refuse,
    run_on_all_ranks,
)
from forge_vlm.answers import answer, is_match
from forge_vlm.data import InvalidSample, Prompt, Prompts

_KEY = "eval.exact_match"
COLUMN = "eval/exact_match"


def prompts_of(config: JobConfig, name: str | None = None) -> Prompts:
    """What writes prompts as a source of conversations of the job does, the first if none is named: also one that is
    prepared or streaming. ConfigError for sources of other kinds."""
    sources = {n: s for n, s in config.data.sources.items() if s.name in KINDS}
    if not sources:
        rule = "must have a source of name 'vlm', whose template and resolution write questions with images"
        raise invalid("data.sources", "missing", ..., rule, "train with one", kind=ConfigError)
    source = sources[name] if name is not None else next(iter(sources.values()))
    options: dict[str, Any] = {k: v for k, v in source.options.items() if k != "format"}
    with config_errors():
        prompts = Prompts.of_source(source.path or "", **options)
    more = ends_of_weights(prompts.tokens.spec, config.init, Path(config.run.dir))
    prompts.end_ids = tuple(dict.fromkeys((*prompts.end_ids, *more)))
    return prompts


class ExactMatch:
    """The questions of a job; None from `of` where it has none.

    asked = ExactMatch.of(trainer.config)
    share = asked(model, meshes, agreement)             # on every rank, between steps
    """

    def __init__(self, config: JobConfig) -> None:
        self.config = config.eval.exact_match
        self.prompts = prompts_of(config, self.config.source)
        assert self.config.path is not None
        try:
            asked = self.prompts.read(self.config.path, self.config.format, self.config.samples)
        except (InvalidSample, OSError) as error:
            raise DataError(problems_under(error, _KEY)) from error
        refuse(_unfit(asked, config))
        size = self.config.rows
        self._batches = [asked[i : i + size] for i in range(0, len(asked), size)]
        self.count = len(asked)

    @classmethod
    def of(cls, config: JobConfig) -> ExactMatch | None:
        """The questions, read and measured. ConfigError for prompts without an answer or longer than the model's rows."""
        return None if config.eval.exact_match.path is None else cls(config)

    def __call__(self, model: nn.Module, meshes: Meshes, agreement: Agreement) -> float:
        """The share of right answers, the same on every rank. Collective; each question is answered by one reader.

        Batches are the same for any number of ranks, and each reader answers as many, the last again where there are none
        left. Draws no random numbers, restores the model's mode and leaves its weights sharded.
        """
        each = -(-len(self._batches) // meshes.batch_size)
        own = range(each * meshes.batch_rank, each * (meshes.batch_rank + 1))
        parts = [self._batches[min(i, len(self._batches) - 1)] for i in own]
        media = run_on_all_ranks(agreement, lambda: self._media(parts))
        right = 0
        for i, part, given in zip(own, parts, media):
            found = answer(
                model,
                self.prompts,
                part,
                given,
                self.config.max_new_tokens,
                stops=meshes.world_size == 1,
            )
            if i < len(self._batches) and meshes.is_batch_leader:
                right += sum(map(self._is_right, part, found))
        reshard(model)
        return float(sum(agreement.exchange(right))) / self.count

    def _is_right(self, prompt: Prompt, found: str) -> bool:
        return is_match(found, prompt.answer or "", self.config.normalise)

    def _media(self, parts: list[list[Prompt]]) -> list[dict[str, Tensor]]:
        try:
            return [self.prompts.media(part) for part in parts]
        except (InvalidSample, OSError) as error:
            raise DataError(problems_under(error, _KEY)) from error


def _unfit(asked: list[Prompt], config: JobConfig) -> Iterator[Problem]:
    """Questions without an answer, and those for which the model has no room."""
    if not asked:
        path = config.eval.exact_match.path
        yield Problem(f"{_KEY}.path", "empty", path, "has no questions", "name another file")
    longest = max((len(p.tokens) for p in asked), default=0)
    new, room = config.eval.exact_match.max_new_tokens, getattr(config.model, "max_seq_len", None)
    for prompt in asked:
        if prompt.answer is None:
            rule, fix = "has no answer to compare with", "end it with that of the assistant"
            yield Problem(f"{_KEY}.path", "answer", prompt.name, rule, fix)
            return
    if room is not None and longest + new > room:
        rule = f"after a prompt of {longest} tokens must be at most model.max_seq_len {room}"
        fix = "lower one, or raise max_seq_len"
        yield Problem(f"{_KEY}.max_new_tokens", "range", new, rule, fix)
