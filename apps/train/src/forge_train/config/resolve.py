"""From layers of raw values to a job that is known to fit together, before anything is started."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit

from forge_data import DataConfig, SourceConfig, load_tokenizer, open_header
from forge_data.protocols import Source
from forge_parallel.legal import ahead_problem
from forge_resilience.policy import RollbackConfig
from forge_train.config.evaluation import evaluation_problems
from forge_train.config.exact_match import KINDS as NO_SPLITS
from forge_train.config.imported import DEFAULT_DIR, over_import, over_table, with_import
from forge_train.config.init import hf_folder, model_of_parent, source_problems
from forge_train.config.layers import Layers, flatten
from forge_train.config.names import name_problems
from forge_train.config.schema import JobConfig
from forge_train.config.structure import key_of, structure
from forge_train.config.tokenizer import tokenizer_problems
from forge_train.config.vlm import chosen_by_experts, exact_match_problems
from forge_train.errors import ConfigError, DataError, refuse
from forge_train.metrics.sinks import sink_problems

#: Keys of a training source that its validation split does not take over.
_OF_TRAINING = tuple(
    f"huggingface.{key}" for key in ("split", "streaming", "virtual_shards", "shuffle_window")
)
#: Optimizers that write weights in bf16 with stochastic rounding.
_ROUNDING = ("adamw", "lion", "muon")


@dataclass(frozen=True)
class ResolvedJob:
    """A checked job and the origin of each value: default, a file, a base file, flag, or derived."""

    config: JobConfig
    origins: Mapping[str, str]

    def values(self) -> dict[str, Any]:
        """Dotted key -> value, in the order of the dataclasses."""
        return dict(flatten(_plain(self.config)))

    def origin(self, key: str) -> str:
        return self.origins.get(key, "default")

    def digest(self) -> str:
        """A digest of all values: ranks of one job must have the same."""
        return hashlib.sha256(repr(self.values()).encode()).hexdigest()[:16]

    def to_toml(self, *, given: bool = False) -> str:
        """The resolved configuration as a file that `forge-train run` accepts, origins as comments.

        With `given` only the values that somebody gave, in files or as flags: the others follow from them again.
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
    layers.replace_old_keys()
    layers = _with_weights(layers)
    built, problems = structure(layers.values)
    data = built.get("data")
    if isinstance(data, DataConfig):
        data_problems = _derive(layers, data, derives_validation)
        data_problems = data_problems if with_data else []
        built, problems = structure(layers.values)
        if not data_problems:
            problems = [_vocabulary_of(p, data) for p in problems]
        if data_problems and not [p for p in problems if "vocab_size" not in p]:
            raise DataError(data_problems)
        problems = [p for p in problems if not (data_problems and "vocab_size" in p)]
    elif "model.vocab_size" not in layers.origins:
        problems = [p for p in problems if not p.startswith("model.vocab_size")]
    if problems:
        raise ConfigError([_with_origin(p, layers) for p in problems])
    job = ResolvedJob(JobConfig(**built), dict(layers.origins))
    _check_combination(job.config, with_data)
    return job


def _vocabulary_of(problem: str, data: DataConfig) -> str:
    """The problem of a vocabulary that was not given, with the source that has none."""
    if not problem.startswith("model.vocab_size is missing"):
        return problem
    return (
        f"model.vocab_size must be given, as data.sources.{next(iter(data.sources))} has ids and no vocabulary; set that of "
        "its tokenizer (GPT-2: 50257)"
    )


def _with_weights(layers: Layers) -> Layers:
    """`layers` over the [model] table that comes with weights: of a folder of Hugging Face that the run is yet to
    begin from, or of an import: of that in run.dir or, for a job without a [model] of its own, that of init.from."""
    names = layers.at("init.from"), layers.at("run.dir") or DEFAULT_DIR
    folder, parent = hf_folder(*names), model_of_parent(*names)
    if parent is not None and not any(key.startswith("model.") for key in layers.origins):
        return over_import(layers, parent)
    if folder is None:
        return with_import(layers)
    # imported here: it takes a second, and few jobs need it
    from forge_train.hf.folder import read_model

    return over_table(layers, read_model(folder).layer(), folder / "config.json")


def _derive(layers: Layers, data: DataConfig, validation: bool) -> list[str]:
    """Derive keys from the data: the vocabulary size, and the validation split."""
    problems: list[str] = []
    for name, config in data.sources.items():
        source = _open(f"data.sources.{name}", config, problems)
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
        for item in dataclasses.fields(SourceConfig):
            value = "validation" if item.name == "split" else getattr(config, item.name)
            values = (
                flatten(_plain(value), f"{item.name}.")
                if dataclasses.is_dataclass(value)
                else [(item.name, value)]
            )
            for key, leaf in values:
                if leaf is not None and key not in _OF_TRAINING:
                    layers.set(f"data.validation.{key}", leaf, f"derived from data.sources.{name}")
    return problems


def _check_combination(config: JobConfig, with_data: bool) -> None:
    """The rules that span sections; each section's own dataclass checks the others."""
    refuse([*name_problems(config), *_section_problems(config), *_generation_problems(config)])
    if with_data:
        refuse(source_problems(config.init.from_, Path(config.run.dir)))
        _check_data(config)


def _section_problems(config: JobConfig) -> list[str]:
    """Keys of two sections that contradict each other, and a package that a key needs."""
    problems = []
    limit = getattr(config.model, "max_seq_len", None)
    if limit is not None and config.data.seq_len > limit:
        problems.append(
            f"data.seq_len {config.data.seq_len} must be at most model.max_seq_len {limit}; "
            f"use {limit}, or set model.max_seq_len = {config.data.seq_len}"
        )
    micro = config.train.micro_batch
    for name, phase in config.data.phases.items():
        if limit is not None and phase.seq_len is not None and phase.seq_len > limit:
            problems.append(
                f"data.phases.{name}.seq_len {phase.seq_len} must be at most model.max_seq_len {limit}; use "
                f"{limit}, or set model.max_seq_len = {phase.seq_len}"
            )
        if micro and phase.global_batch is not None and phase.global_batch % micro:
            problems.append(
                f"data.phases.{name}.global_batch {phase.global_batch} must be divisible by train.micro_batch {micro}; "
                f"use {max(1, phase.global_batch // micro) * micro}"
            )
    mtp = getattr(config.model, "mtp", None)
    if mtp is not None and mtp.num_modules and config.train.objective is not None:
        problems.append(
            f"model.mtp.num_modules {mtp.num_modules} adds to the loss of logits, and train.objective "
            f"{config.train.objective!r} computes its own; use one of them"
        )
    depths = 0 if mtp is None else mtp.num_modules
    if wrong := ahead_problem(config.parallel, depths, "model.mtp.num_modules"):
        problems.append(f"parallel.{wrong}")
    problems += sink_problems(config.metrics)
    if config.optimizer.name == "schedule_free_adamw" and config.schedule.name != "constant":
        problems.append(
            f"schedule.name {config.schedule.name!r} must be 'constant' with optimizer.name 'schedule_free_adamw', "
            "whose average stands for the fall of the rate; set schedule.name = 'constant', with warmup_steps"
        )
    if config.parallel.param_dtype == "bf16" and config.optimizer.name not in _ROUNDING:
        problems.append(
            f"parallel.param_dtype 'bf16' must go with an optimizer that rounds updates stochastically, and "
            f"optimizer.name is {config.optimizer.name!r}; use {', '.join(_ROUNDING)}, or parallel.param_dtype = 'fp32'"
        )
    if config.parallel.param_dtype == "bf16" and config.lora.rank:
        problems.append(
            f"parallel.param_dtype 'bf16' must go without adapters, and lora.rank is {config.lora.rank}: frozen weights "
            "are stored in lora.base_dtype; use parallel.param_dtype = 'fp32'"
        )
    if config.eval.every_steps == 0 and config.data.validation is not None:
        problems.append(
            "data.validation is given but eval.every_steps 0 never reads it; set "
            "eval.every_steps = 100 or remove [data.validation]"
        )
    if config.checkpoint.best is not None and config.data.validation is None:
        problems.append(
            f"checkpoint.best {config.checkpoint.best!r} needs data.validation, which is not given; give "
            "[data.validation] or leave checkpoint.best out"
        )
    if config.eval.every_steps and chosen_by_experts(config.model):
        problems.append(
            "model.fusion.moma.router 'expert_choice' chooses among later tokens, too, and cannot evaluate; set "
            "eval.every_steps = 0, or router = 'auxiliary_router'"
        )
    problems += [*evaluation_problems(config), *exact_match_problems(config)]
    resilience = config.resilience
    actions = (resilience.nonfinite.action, resilience.spike.action)
    if resilience.rollback != RollbackConfig() and "rollback" not in actions:
        problems.append(
            "resilience.rollback is set, but no action is 'rollback'; set resilience.nonfinite.action or "
            "resilience.spike.action to 'rollback', or leave it out"
        )
    if config.checkpoint.digest == "blake3" and importlib.util.find_spec("blake3") is None:
        problems.append(
            "checkpoint.digest 'blake3' needs the package blake3, which is not installed; pip install "
            "'forge-ckpt[fast]' or leave it out"
        )
    return problems


def _generation_problems(config: JobConfig) -> list[str]:
    """Parts of the model that cannot write the sample at the end of the run."""
    if not config.sample.max_new_tokens:
        return []
    fix = (
        f"sample.max_new_tokens {config.sample.max_new_tokens} does; set sample.max_new_tokens = 0"
    )
    problems = []
    moe = getattr(config.model, "moe", None)
    if moe and moe.router == "expert_choice":
        problems.append(
            "model.moe.router 'expert_choice' chooses among all tokens of a row and cannot generate, and "
            + fix
        )
    if chosen_by_experts(config.model):
        problems.append("model.fusion.moma.router 'expert_choice' cannot generate, and " + fix)
    spec = getattr(config.model, "attention", None)
    if spec and spec.mask != "causal":
        problems.append(
            f"model.attention.mask {spec.mask!r} is not computed with a KV cache and cannot generate, and "
            + fix
        )
    return problems


def _check_data(config: JobConfig) -> None:
    """Vocabulary, tokenizer and splits, from the sources' headers; DataError with all problems."""
    problems: list[str] = []
    tokenizers: dict[str, str] = {}
    validation = config.data.validation
    for name, table in config.data.sources.items():
        key = f"data.sources.{name}"
        source = _open(key, table, problems)
        if source is not None:
            problems += _vocabulary_problems(key, source, config.model)
            problems += _tokenizer_problems(key, source, config)
            problems += _sample_problems(key, source, config)
            if source.tokenizer is not None:
                tokenizers[key] = load_tokenizer(source.tokenizer).fingerprint
        same = all(
            getattr(table, f.name) == getattr(validation, f.name, None)
            for f in dataclasses.fields(SourceConfig)
        )
        if source is not None and same:
            problems.append(
                f"{key} and data.validation are the same data; validation must be held out: use "
                "split = 'validation' or another path"
            )
    (first, wanted), *others = tokenizers.items() or [("", "")]
    problems += [
        f"{key}: its tokenizer must be that of {first}, or ids mean two things; prepare one of them again"
        for key, found in others
        if found != wanted
    ]
    held_out = {f"eval.sets.{name}": table for name, table in config.eval.sets.items()}
    for key, own in {"data.validation": validation, **held_out}.items():
        fix = "; or set eval.every_steps = 0" if own is validation else ""
        source = None if own is None else _open(key, own, problems, fix)
        if source is not None:
            problems += _vocabulary_problems(key, source, config.model)
            problems += _tokenizer_problems(key, source, config)
            problems += _held_out_problems(key, source, first, wanted)
    if problems:
        raise DataError(problems)


def _held_out_problems(key: str, source: Source, first: str, wanted: str) -> list[str]:
    """Why ids of held-out rows mean other text than those of `first`, whose tokenizer has the fingerprint `wanted`."""
    if not key.startswith("eval.sets.") or not wanted or source.tokenizer is None:
        return []
    if load_tokenizer(source.tokenizer).fingerprint == wanted:
        return []
    return [
        f"{key}: its tokenizer is not that of {first}, so the model would read other text; prepare it with that one"
    ]


def _open(key: str, table: SourceConfig, problems: list[str], fix: str = "") -> Any:
    """The source of a table; None if it cannot be opened, with the problem added to the list."""
    try:
        return open_header(table)
    except (ValueError, OSError) as error:
        problems.append(f"{key}: {_sentence(error)}{fix}")
        return None


def _vocabulary_problems(key: str, source: Source, model: Any) -> list[str]:
    vocab_size, beyond = model.vocab_size, getattr(model, "input_only_ids", 0)
    try:
        highest = source.max_token_id  # files without a sidecar are read for it
    except (ValueError, OSError) as error:
        return [f"{key}: {_sentence(error)}"]
    if highest < vocab_size + beyond:
        return []
    and_more = f" and model.input_only_ids {beyond}" if beyond else ""
    return [
        f"{key}: token id {highest} must be below model.vocab_size {vocab_size}{and_more}; set "
        f"model.vocab_size = {max(highest + 1, source.vocab_size or 0)} or prepare the data with "
        "the model's tokenizer"
    ]


def _tokenizer_problems(key: str, source: Source, config: JobConfig) -> list[str]:
    return tokenizer_problems(key, source.tokenizer, config.init, Path(config.run.dir))


def _sample_problems(key: str, source: Source, config: JobConfig) -> list[str]:
    """Why the text of the sample cannot be written with the tokenizer of the data, or is too long."""
    sample, limit = config.sample, getattr(config.model, "max_seq_len", None)
    if not sample.max_new_tokens:
        return []
    if source.tokenizer is None:
        return [
            f"{key}: has no tokenizer, but sample.max_new_tokens {sample.max_new_tokens} needs one; set "
            "sample.max_new_tokens = 0 or prepare the data with forge-data"
        ]
    if not limit:
        return []
    length = max(1, len(load_tokenizer(source.tokenizer).encode(sample.prompt)))
    if length + sample.max_new_tokens <= limit:
        return []
    return [
        f"sample.max_new_tokens {sample.max_new_tokens} after a prompt of {length} tokens must stay within "
        f"model.max_seq_len {limit}; use {max(limit - length, 0)} or fewer"
    ]


def _sentence(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or ''}: {error.strerror}; name an existing path"
    return str(error)


def _with_origin(problem: str, layers: Layers) -> str:
    key = problem.split(":", 1)[0].split(" ", 1)[0]
    origin = layers.origins.get(key)
    return f"{problem}  [{origin}]" if origin else problem


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {key_of(f.name): _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return list(value) if isinstance(value, tuple) else value


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
            item.comment(origin)
            table.add(key, item)
