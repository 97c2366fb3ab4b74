"""From layers of raw values to a job that is known to fit together, before anything is started."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tomlkit

from forge_data import DataConfig, load_tokenizer
from forge_data.protocols import Source
from forge_data.run_checks import open_table, token_id_problems
from forge_data.tokenizer import encode_prompt
from forge_train._shared.problems import Problem
from forge_train._shared.toml_files import flatten
from forge_train.build.rules import rule_problems
from forge_train.config.evaluation import KINDS as NO_SPLITS
from forge_train.config.imported import (
    DEFAULT_DIR,
    over_import,
    over_table,
    training_problems,
    with_import,
)
from forge_train.config.init import (
    FILES,
    NAME,
    hf_folder,
    model_of_parent,
    source_problems,
    tokenizer_problems,
)
from forge_train.config.layers import Layers
from forge_train.config.model import BUILT_IN_MODELS
from forge_train.config.schema import JobConfig
from forge_train.config.structure import dotted_fields, key_of, section_types, structure
from forge_train.errors import ConfigError, DataError, refuse

#: Keys of a training source that its validation split does not take over.
_OF_TRAINING = tuple(
    f"huggingface.{key}" for key in ("split", "streaming", "virtual_shards", "shuffle_window")
)
_VOCABULARY = "model.vocab_size"


@dataclass(frozen=True)
class ResolvedJob:
    """A checked job and the origin of each value: default, a file, a base file, flag, or derived."""

    config: JobConfig
    origins: Mapping[str, str]

    def values(self) -> dict[str, Any]:
        """Dotted key -> value, in the order of the dataclasses."""
        return dict(flatten(_plain(self.config)))

    def origin(self, key: str) -> str:
        """Where the value of a dotted key comes from, as `explain` shows it; `default` for one that nothing sets."""
        return self.origins.get(key, "default")

    def digest(self) -> str:
        """A digest of all values: ranks of one job must have the same."""
        return hashlib.sha256(repr(self.values()).encode()).hexdigest()[:16]

    def to_toml(self, *, given: bool = False) -> str:
        """The resolved configuration as a file that `forge-train run` accepts, origins as comments.

        With `given` only the values of files and flags: the others follow from them again.
        """
        document = tomlkit.document()
        _fill(document, _plain(self.config), "", self, given)
        return tomlkit.dumps(document)


def resolve(
    layers: Layers, *, with_data: bool = True, derives_validation: bool = True
) -> ResolvedJob:
    """Check everything that can be checked without starting anything.

    Opens the sources (headers only: nothing is tokenized); with `with_data` False they may be missing. A job without
    [data.validation] gets that of its first source, unless `derives_validation` is False. Raises ConfigError with all
    problems of all sections and of their combination, or DataError when the data cannot be opened or does not
    fit the model.
    """
    layers = copy.deepcopy(layers)  # values that are derived here are not the caller's
    layers.replace_old_keys()
    layers = _with_weights(layers)

    built, problems = structure(layers.values)
    data = built.get("data")
    if isinstance(data, DataConfig):
        data_problems = _derive(layers, data, derives_validation)
        data_problems = data_problems if with_data else []
        built, problems = structure(layers.values)
        problems = [p for p in problems if not (data_problems and p.key == _VOCABULARY)]
        if data_problems and not problems:
            raise DataError(data_problems)
        problems = [_vocabulary_of(p, data) for p in problems]
    elif _VOCABULARY not in layers.origins:
        problems = [p for p in problems if p.key != _VOCABULARY]

    origins = layers.origins
    refuse(dataclasses.replace(p, origin=p.origin or origins.get(p.key, "")) for p in problems)

    job = ResolvedJob(JobConfig(**built), dict(origins))
    refuse(rule_problems(job.config))
    if with_data:
        refuse(source_problems(job.config.init.from_, Path(job.config.run.dir)))
        _check_data(job.config)
    return job


def resolve_to_show(layers: Layers) -> tuple[ResolvedJob, tuple[Problem, ...]]:
    """The job, and which of its data is not there, so that nothing is known of any: for verbs that start nothing.

    Raises as `resolve`, also for data that is there and does not fit.
    """
    try:
        return resolve(layers), ()
    except DataError as error:
        if any(problem.code != "not_found" for problem in error.problems):
            raise
        missing = error
    try:
        return resolve(layers, with_data=False), missing.problems
    except ConfigError as error:
        raise (missing if error.key == _VOCABULARY else error) from None


def _vocabulary_of(problem: Problem, data: DataConfig) -> Problem:
    """The problem of a vocabulary that was not given, with the source that has none."""
    if (problem.key, problem.code) != (_VOCABULARY, "missing"):
        return problem
    rule = f"must be given, as data.sources.{next(iter(data.sources))} has ids and no vocabulary"
    fix = "set that of its tokenizer (GPT-2: 50257)"
    return dataclasses.replace(problem, code="vocabulary", rule=rule, fix=fix)


def _with_weights(layers: Layers) -> Layers:
    """`layers` over the [model] table that comes with weights: of a folder of Hugging Face that the run is yet to
    begin from, or of an import: of that in run.dir or, for a job without a [model] of its own, that of init.from."""
    names = layers.at("init.from"), layers.at("run.dir") or DEFAULT_DIR
    folder, parent = hf_folder(*names), model_of_parent(*names)
    source = folder or (Path(str(names[1])) if parent is None else parent.parent) / FILES
    refuse(training_problems(source / "config.json"))
    if parent is not None and not any(key.startswith("model.") for key in layers.origins):
        return over_import(layers, parent)
    if folder is None:
        return with_import(layers)
    # imported here: it takes a second, and few jobs need it
    from forge_train.build.hf_models import read_model

    size = layers.at("init.vocab_size")
    model = read_model(folder, size if type(size) is int else None)
    return over_table(layers, model.layer(), folder / "config.json")


def _derive(layers: Layers, data: DataConfig, validation: bool) -> list[Problem]:
    """Derive keys from the data: the vocabulary size, and the validation split."""
    problems: list[Problem] = []
    for name, config in data.sources.items():
        source = open_table(f"data.sources.{name}", config, problems)
        if source is None:
            continue
        model = layers.values.setdefault("model", {})
        if isinstance(model, dict) and "vocab_size" not in model and source.vocab_size is not None:
            layers.set("model.vocab_size", source.vocab_size, f"derived from data.sources.{name}")

    evaluation = layers.values.get("eval", {})
    splits = [config for config in data.sources.values() if config.name not in NO_SPLITS]
    if (
        validation
        and data.validation is None
        and len(splits) == len(data.sources)
        and isinstance(evaluation, dict)
        and evaluation.get("every_steps") != 0
    ):
        (name, config), *_ = data.sources.items()
        layers.set("data.validation", {}, f"derived from data.sources.{name}")

        for key, value in flatten(_plain(config.as_source())):
            if value is not None and key not in _OF_TRAINING:
                value = "validation" if key == "split" else value
                layers.set(f"data.validation.{key}", value, f"derived from data.sources.{name}")
    return problems


def _check_data(config: JobConfig) -> None:
    """Vocabulary, tokenizer and splits, from the sources' headers; DataError with all problems."""
    problems: list[Problem] = []
    tokenizers: dict[str, str] = {}
    validation = config.data.validation
    for name, table in config.data.sources.items():
        key = f"data.sources.{name}"
        if (source := open_table(key, table, problems)) is None:
            continue
        problems += _id_problems(key, source, config)
        problems += _sample_problems(key, source, config)
        if source.tokenizer is not None:
            tokenizers[key] = load_tokenizer(source.tokenizer).fingerprint
        if table.as_source() == validation:
            rule, fix = f"is the same data as {key}", "use split = 'validation' or another path"
            problems.append(Problem("data.validation", "same_data", ..., rule, fix))

    (first, wanted), *others = tokenizers.items() or [("", "")]
    rule, fix = f"must have the tokenizer of {first}, or ids mean two things", "prepare one again"
    problems += [
        Problem(key, "tokenizer", ..., rule, fix) for key, found in others if found != wanted
    ]

    held_out = {f"eval.sets.{name}": table for name, table in config.eval.sets.items()}
    for key, own in {"data.validation": validation, **held_out}.items():
        fix = "set eval.every_steps = 0" if own is validation else ""
        source = None if own is None else open_table(key, own, problems, fix)
        if source is None:
            continue
        problems += _id_problems(key, source, config)
        spec = source.tokenizer if wanted and own is not validation else None
        if spec is not None and load_tokenizer(spec).fingerprint != wanted:
            rule = f"must have the tokenizer of {first}, or the model reads other text"
            problems.append(Problem(key, "tokenizer_of_set", ..., rule, "prepare it with that one"))
    if problems:
        raise DataError(problems)


def _id_problems(key: str, source: Source, config: JobConfig) -> list[Problem]:
    """Why ids of a source are none of the model's, or mean other text than to its weights."""
    model, beyond = config.model, getattr(config.model, "input_only_ids", 0)
    more_rows = partial(_more_rows, config)
    found: list[Any] = token_id_problems(key, source, model.vocab_size, beyond, more_rows)
    return found + tokenizer_problems(key, source.tokenizer, config.init, Path(config.run.dir))


def _more_rows(config: JobConfig, size: int) -> str:
    """How a model gets rows for `size` tokens: weights that it begins with keep their number otherwise."""
    names = config.init.from_, config.run.dir
    if hf_folder(*names) is not None:
        return f"set init.vocab_size = {size}, which adds rows,"
    if model_of_parent(*names) is not None or (Path(config.run.dir) / NAME).is_file():
        return f"import the folder into another run.dir with --init.vocab_size {size}, which adds rows,"
    return f"set model.vocab_size = {size}"


def _sample_problems(key: str, source: Source, config: JobConfig) -> Iterator[Problem]:
    """Why the text of the sample cannot be written with the tokenizer of the data, or is too long."""
    sample, limit = config.sample, getattr(config.model, "max_seq_len", None)
    tokens, argument = sample.max_new_tokens, "sample.max_new_tokens"
    if tokens and source.tokenizer is None:
        fix = f"set {argument} = 0 or prepare the data with forge-data"
        yield Problem(argument, "requires", tokens, f"needs a tokenizer, and {key} has none", fix)
    elif tokens and limit and source.tokenizer is not None:
        length = max(1, len(encode_prompt(load_tokenizer(source.tokenizer), sample.prompt)))
        if length + tokens > limit:
            rule = f"after a prompt of {length} tokens must stay within model.max_seq_len {limit}"
            fix = f"use {max(limit - length, 0)} or fewer"
            yield Problem(argument, "above_limit", tokens, rule, fix)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {key_of(f.name): _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _shown_origin(job: ResolvedJob, key: str, value: Any) -> str:
    """The origin of a value; `default` for those of a configuration that a run saved, which sets all keys."""
    origin = job.origin(key)
    return "default" if origin.endswith("config.toml") and is_default(key, value) else origin


def is_default(key: str, value: Any) -> bool:
    """Whether a value is the default of its key, wherever it was set."""
    parts = key.split(".")
    named = (".".join([*parts[:i], "<name>", *parts[i + 1 :]]) for i in range(len(parts)))
    return any(each in _defaults() and _defaults()[each] == value for each in (key, *named))


@functools.cache
def _defaults() -> dict[str, Any]:
    """Dotted key -> its default, for keys that have one."""
    found: dict[str, Any] = {}
    for section, table in section_types({}).items():
        for kind in BUILT_IN_MODELS.values() if section == "model" else [table]:
            for key, _, item, _ in dotted_fields(kind, section):
                if item.default is not dataclasses.MISSING:
                    found.setdefault(key, item.default)
                elif item.default_factory is not dataclasses.MISSING:
                    found.setdefault(key, item.default_factory())
    return {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()}


def _fill(
    table: Any, values: Mapping[str, Any], prefix: str, job: ResolvedJob, given: bool
) -> None:
    for key, value in values.items():
        origin = job.origin(f"{prefix}{key}")
        if isinstance(value, dict):
            child = tomlkit.table()
            _fill(child, value, f"{prefix}{key}.", job, given)
            if child or not given:
                table.add(key, child)
        elif not given or not origin.startswith(("default", "derived")):
            item = tomlkit.item("none" if value is None else value)
            item.comment(_shown_origin(job, f"{prefix}{key}", value))
            table.add(key, item)
