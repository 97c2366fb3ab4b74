"""`forge-train export`: a checkpoint of a run, of any layout, becomes a folder of Hugging Face."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import Tensor

from forge_ckpt import Store, read_tensors
from forge_ckpt.hf import Row, read_json, save_hf
from forge_data import DataConfig
from forge_train._shared.problems import invalid, problems_of
from forge_train._shared.toml_files import read_toml
from forge_train.config.imported import FILES, NAME, training_options
from forge_train.config.lora import LoRASection
from forge_train.config.schema import BuiltInModelConfig
from forge_train.config.structure import structure
from forge_train.config.tokenizer import gives_same_ids, tokenizer_in
from forge_train.errors import ConfigError, JobError, config_errors
from forge_train.hf.adapters import MergedTensors, peft_files
from forge_train.hf.beside import joined, rows_beside
from forge_train.hf.compare import compare
from forge_train.hf.families import (
    beside_of,
    family_of_origin,
    find_family,
    modules_of,
    rows_of,
    section_to_hf,
)
from forge_train.hf.folder import SIDECAR, TOKENIZER_FILES, files_in
from forge_train.hf.tokenizing import Tokenizing, as_json, is_talks, tokenizing_of
from forge_train.trainer.run_directory import RunDirectory
from forge_train.trainer.store_errors import store_errors

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
#: Keys that are the tokenizer's, not the model's.
_TOKENS = ("pad_token_id",)
_GENERATION = "generation_config.json"
_STEP = re.compile(r"step-(\d+)")
#: Buffers of mixtures: a choice of experts needs its bias in fp32, and counts are of training alone.
#: Modules of multi-token prediction change no logits, and transformers has no place for them.
_KEEP, _IGNORE = ("*.router.expert_bias",), ("*.lagged_counts", "mtp.*")


def export_run(
    source: Annotated[
        tyro.conf.Positional[Path],
        tyro.conf.arg(help="folder of a run, or one of its checkpoints (.../step-00000100)"),
    ],
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(help="new folder to write")],
    /,
    step: Annotated[
        int | None, tyro.conf.arg(help="checkpoint of the run; without it the newest")
    ] = None,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"], tyro.conf.arg(help="of the floating-point tensors written")
    ] = "fp32",
    family: Annotated[
        str | None,
        tyro.conf.arg(
            help="of transformers; without it that of the import, or the first that fits"
        ),
    ] = None,
    adapter: Annotated[
        bool,
        tyro.conf.arg(help="write the adapters of [lora] alone, as a folder that peft loads"),
    ] = False,
    check: Annotated[
        bool,
        tyro.conf.arg(help="run both models on the same tokens, and print how much logits differ"),
    ] = False,
    template: Annotated[
        str | None,
        tyro.conf.arg(
            help="source of conversations whose tokenizer and chat template are written; needed where sources differ"
        ),
    ] = None,
) -> int:
    """Write a checkpoint as a folder that transformers loads: weights, config.json, tokenizer with the chat template and
    the end tokens of training.

    Any layout of ranks may have saved it. The model is never held whole, unless --check runs it. Adapters are added to
    the weights.
    """
    run, checkpoint = _find(source, step)
    section, data, low_rank = _sections(run)
    lora = None if low_rank is None else low_rank.adapters
    if adapter:
        _refuse_adapter(low_rank, check)
        found, note = _tokenizing(data, template)
        more = {} if found is None else found.files()
        _export_adapter(run, checkpoint, out, section, low_rank, family, _DTYPES[dtype], more)
        if note := note or (found and found.note):
            print(note)
        return 0
    with config_errors():
        name = find_family(section, family or family_of_origin(section, _original(run)))
        beside = _rows_beside(run, beside_of(section, name), name)
        rows = (*rows_of(section, name), *beside)
        written = section_to_hf(section, name)
        hf, files, note = _config_and_files(run, data, name, written, template)
    hf |= {"dtype": _NAMES[dtype], "torch_dtype": _NAMES[dtype]}
    files |= {
        "config.json": as_json(hf),
        SIDECAR: as_json(
            {"format": 1, "step": _number(checkpoint), "model": training_options(section)}
        ),
    }
    with store_errors(checkpoint, JobError), config_errors(), contextlib.ExitStack() as opened:
        weights: Any = checkpoint
        if lora is not None:
            weights = opened.enter_context(MergedTensors(checkpoint, run.base, lora.scale))
        whole = opened.enter_context(joined(weights, run.path / FILES)) if beside else weights
        save_hf(out, rows, whole, dtype=_DTYPES[dtype], keep=_KEEP, ignore=_IGNORE, files=files)
        print(f"exported {checkpoint} to {out}: {name}, {dtype}")
        if section.mtp.num_modules:
            print(f"left out, as transformers has no place for it: mtp ({section.mtp.num_modules})")
        if note is not None:
            print(note)
        if check:
            print(compare(section, _weights(weights, _DTYPES[dtype]), out))
    return 0


def _rows_beside(run: RunDirectory, patterns: Sequence[str], name: str) -> list[Row]:
    """The rows of what a folder of the family has beside the model; ValueError where the run has none of it."""
    rows = rows_beside(run.path / FILES) if patterns else []
    if patterns and not rows:
        rule = (
            f"needs {', '.join(patterns)}, and {run.path} did not begin from a folder that has them"
        )
        raise invalid("--family", "requires", name, rule, "begin the run with forge-train import")
    return rows


def _config_and_files(
    run: RunDirectory, data: DataConfig | None, name: str, hf: dict[str, Any], template: str | None
) -> tuple[dict[str, Any], dict[str, bytes], str | None]:
    """(keys of config.json, other files, a note) of a run: `hf` over what it began with, and the tokenizer of the data."""
    original, kept = _original(run), run.path / FILES
    files = files_in(kept, ["*"]) if original else {}
    same = original if original and original["model_type"] == name else {}
    found, lost = _tokenizing(data, template)
    other = _has_other_tokenizer(run, found)
    if other:
        files = {n: content for n, content in files.items() if n.startswith("LICENSE")}
        same = {key: value for key, value in same.items() if not key.endswith("token_id")}
    hf = {**_merged(same, hf), **{key: same[key] for key in _TOKENS if key in same}}
    if found is None:
        # conversations that cannot be read may have been written by another template than the folder's
        talks = data is not None and any(is_talks(source) for source in data.sources.values())
        return hf, files, lost if other or talks or not original else None
    if original and not found.talks and tokenizer_in(kept) is None:
        return hf, files, None  # the end token of the weights is that of an unknown tokenizer

    own, ids = found.files(), found.ids(kept)
    if found.talks or other or not original:
        old = files_in(kept, TOKENIZER_FILES) if original else {}
        files = {n: content for n, content in files.items() if n not in old} | own
    for table in (hf, hf.get("text_config")):
        if isinstance(table, dict):
            table |= ids
    before = json.loads(files.get(_GENERATION, b"{}"))
    if {**before, **ids} != before:
        files[_GENERATION] = as_json({**before, **ids})
    changed = "the tokenizer written is that of the data, not that of the weights"
    return hf, files, found.note or (changed if other else None)


def _refuse_adapter(low_rank: LoRASection | None, check: bool) -> None:
    """ConfigError for what a folder of peft cannot hold."""
    if low_rank is not None and low_rank.whole:
        rule = (
            f"writes only low-rank matrices, and lora.whole {list(low_rank.whole)} are trained too"
        )
        raise invalid("--adapter", "whole", ..., rule, "leave it out", kind=ConfigError)
    if check:
        rule = "compares full models, and --adapter writes none"
        raise invalid("--check", "excludes", ..., rule, "leave one out", kind=ConfigError)


def _merged(original: dict[str, Any], written: dict[str, Any]) -> dict[str, Any]:
    """`written` over the original, and so its tables of parts (text_config) of the same kind."""
    parts = {
        key: {**original[key], **value}
        for key, value in written.items()
        if isinstance(value, dict)
        and isinstance(original.get(key), dict)
        and "model_type" in value
        and original[key].get("model_type") == value["model_type"]
    }
    return {**original, **written, **parts}


def _export_adapter(
    run: RunDirectory,
    checkpoint: Path,
    out: Path,
    section: BuiltInModelConfig,
    low_rank: LoRASection | None,
    family: str | None,
    dtype: torch.dtype,
    more: dict[str, bytes],
) -> None:
    """Write a folder of peft with `more` files; ConfigError for a run without adapters, or layers that the family has
    otherwise."""
    lora = None if low_rank is None else low_rank.adapters
    if low_rank is None or lora is None:
        rule = f"needs [lora], and {run.path} has none"
        raise invalid("--adapter", "requires", ..., rule, "leave it out", kind=ConfigError)
    with store_errors(checkpoint, JobError), config_errors():
        name = find_family(section, family or family_of_origin(section, _original(run)))
        with MergedTensors(checkpoint, run.base, lora.scale) as tensors:
            names, base = rows_of(section, name), _base_folder(run)
            files, rows = peft_files(tensors, names, lora, base, modules_of(section, name))
            # peft has no key for it
            about = {"format": 1, "step": _number(checkpoint), "base_dtype": low_rank.base_dtype}
            files[SIDECAR] = as_json(about)
            files |= more
            save_hf(out, rows, tensors.factors(), dtype=dtype, files=files, stem="adapter_model")
    print(f"exported the adapters of {checkpoint} to {out}: {name}, rank {lora.rank}")
    print(f"the base weights were {low_rank.base_dtype} in training: give peft the same")


def _original(run: RunDirectory) -> dict[str, Any]:
    """`config.json` of the folder that the weights came from, if they did."""
    kept = run.path / FILES
    return read_json(kept / "config.json") if kept.is_dir() else {}


def _base_folder(run: RunDirectory) -> str | None:
    """The folder of Hugging Face whose weights are the base of a run, itself or through forks of adapters."""
    while run.parent.is_file() and run.base.is_dir():
        parent = read_json(run.parent)
        if parent["step"] is None:
            return str(parent["checkpoint"])
        if parent["run_dir"] is None:
            return None
        run = RunDirectory(parent["run_dir"])
    return None


def _find(source: Path, step: int | None) -> tuple[RunDirectory, Path]:
    """The run and the checkpoint that `source` and --step name; ConfigError where there is none."""
    at = source.absolute()
    if _STEP.fullmatch(at.name):
        if step is not None:
            rule = f"and the checkpoint {source} are both given"
            raise invalid("--step", "excludes", step, rule, "leave one out", kind=ConfigError)
        run, checkpoint = RunDirectory(at.parent.parent), source
    else:
        run = RunDirectory(at.parent if at.name == "checkpoints" else source)
        if not run.has_checkpoints():
            rule, fix = "has no checkpoint", "name the folder of a run, or a checkpoint in it"
            raise invalid("source", "not_found", str(source), rule, fix, kind=ConfigError)
        with (
            store_errors(run.checkpoints, ConfigError),
            Store(run.checkpoints, read_only=True) as store,
        ):
            steps = store.steps()
        if step is not None and step not in steps:
            rule = f"must be one of {steps}, the checkpoints of {source}"
            raise invalid("--step", "unknown", step, rule, "use one", kind=ConfigError)
        checkpoint = run.checkpoint(steps[-1] if step is None else step)
    if not (checkpoint / "manifest.json").is_file():
        rule, shown = "is not a committed checkpoint", str(checkpoint)
        raise invalid("source", "damaged", shown, rule, "name another", kind=ConfigError)
    return run, checkpoint


def _sections(
    run: RunDirectory,
) -> tuple[BuiltInModelConfig, DataConfig | None, LoRASection | None]:
    """[model], [data] and [lora] of the run, or [model] of an import that nothing has trained yet."""
    path = next((p for p in (run.config, run.path / NAME) if p.exists()), None)
    if path is None:
        rule = f"has no {run.config.name} and no {NAME}, which describe the model"
        raise invalid("source", "model", str(run.path), rule, "restore one", kind=ConfigError)
    try:
        values = read_toml(path)
    except ValueError as error:
        raise ConfigError(problems_of(error), str(path)) from error
    built, problems = structure(
        {key: values[key] for key in ("model", "data", "lora") if key in values}
    )
    if own := [problem for problem in problems if problem.key.startswith("model")]:
        raise ConfigError(own, str(path))
    section = built["model"]
    if not isinstance(section, BuiltInModelConfig):
        rule = "must be 'transformer': families hold the built-in model"
        fix = "write rows of your own and use forge_ckpt.hf.save_hf"
        raise invalid("model.name", "unsupported", section.name, rule, fix, kind=ConfigError)
    return section, built.get("data"), built.get("lora")


def _has_other_tokenizer(run: RunDirectory, found: Tokenizing | None) -> bool:
    """Whether the data was made with another tokenizer than the one next to the weights; of data that cannot be read
    the configuration says it."""
    path = tokenizer_in(run.path / FILES)
    if path is None or not run.config.exists():
        return False
    if found is None:
        return bool(read_toml(run.config).get("init", {}).get("other_tokenizer", False))
    return not gives_same_ids(found.spec, path)


def _tokenizing(
    data: DataConfig | None, template: str | None
) -> tuple[Tokenizing | None, str | None]:
    """The tokenizer of the data, or the reason why it is missing."""
    if data is None:
        return None, "no tokenizer is written: nothing was trained"
    try:
        return tokenizing_of(data, template), None
    except (ValueError, OSError, ImportError) as error:
        return None, f"no tokenizer is written: {error}"


def _weights(source: Path | MergedTensors, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The tensors as they were exported."""
    if isinstance(source, Path):
        saved = read_tensors(source, ["model.*"])
    else:
        saved = ((name, source.read(name)) for name in source.meta)
    for name, tensor in saved:
        name = name.removeprefix("model.")
        if any(fnmatchcase(name, pattern) for pattern in _IGNORE):
            continue
        keep = not tensor.is_floating_point() or any(fnmatchcase(name, p) for p in _KEEP)
        yield name, tensor if keep else tensor.to(dtype)


def _number(checkpoint: Path) -> int:
    found = _STEP.fullmatch(checkpoint.absolute().name)
    assert found is not None, checkpoint
    return int(found[1])
