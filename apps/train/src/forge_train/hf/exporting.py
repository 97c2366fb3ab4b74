"""`forge-train export`: a checkpoint of a run, of any layout, becomes a folder of Hugging Face."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
import tyro

from forge_ckpt import Store
from forge_ckpt.hf import (
    HFFamily,
    MergedTensors,
    peft_files,
    read_files,
    read_json,
    save_hf,
    tensors_beside,
)
from forge_data import DataConfig
from forge_data.tokenizer_files import (
    TOKENIZER_FILES,
    TokenizerFiles,
    as_json,
    gives_same_ids,
    tokenizer_in,
)
from forge_train._shared.problems import invalid, problems_of
from forge_train._shared.toml_files import read_toml
from forge_train.config.imported import FILES, NAME, training_options
from forge_train.config.lora import LoRASection
from forge_train.config.schema import BuiltInModelConfig
from forge_train.config.structure import structure
from forge_train.errors import ConfigError, JobError, config_errors
from forge_train.hf.families import configs_of, family_of, modules_of
from forge_train.hf.folder import SIDECAR
from forge_train.hf.importing import check_folder
from forge_train.hf.tokenizing import is_talks, tokenizing_of
from forge_train.trainer.run_directory import RunDirectory
from forge_train.trainer.store_errors import store_errors

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_GENERATION = "generation_config.json"
_STEP = re.compile(r"step-(\d+)")
#: Buffers of mixtures: a choice of experts needs its bias in fp32, and counts are of training alone.
#: Modules of multi-token prediction change no logits, and transformers has no place for them.
_KEEP, _IGNORE = ("*.router.expert_bias",), ("*.lagged_counts", "mtp.*")


class _Run(NamedTuple):
    """A run, or an import that nothing has trained yet, and the tables of its configuration."""

    paths: RunDirectory
    section: BuiltInModelConfig
    data: DataConfig | None
    lora: LoRASection

    @property
    def original(self) -> dict[str, Any]:
        """`config.json` of the folder that the weights came from, if they did."""
        kept = self.paths.path / FILES
        return read_json(kept / "config.json") if kept.is_dir() else {}


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
    paths, checkpoint = _find(source, step)
    run, out_dtype = _read_run(paths), _DTYPES[dtype]
    lora = run.lora.adapters
    if adapter:
        _require_adapters(run, check)
    with store_errors(checkpoint, JobError), config_errors(), contextlib.ExitStack() as opened:
        found = family_of(run.section, family, run.original.get("model_type"))
        about = {"format": 1, "step": int(checkpoint.absolute().name[5:])}
        weights: Any = checkpoint
        if lora is not None:
            weights = opened.enter_context(MergedTensors(checkpoint, paths.base, lora.scale))
        if adapter:
            note = _save_adapters(run, out, found, weights, out_dtype, about, template)
            print(
                f"exported the adapters of {checkpoint} to {out}: {found.name}, rank {run.lora.rank}"
            )
            print(f"the base weights were {run.lora.base_dtype} in training: give peft the same")
        else:
            note = _save_model(run, out, found, weights, out_dtype, about, template)
            print(f"exported {checkpoint} to {out}: {found.name}, {dtype}")
            if depth := run.section.mtp.num_modules:
                print(f"left out, as transformers has no place for it: mtp ({depth})")
        if note:
            print(note)
    if check:
        print(check_folder(out))
    return 0


def _save_model(
    run: _Run,
    out: Path,
    family: HFFamily,
    weights: Any,
    dtype: torch.dtype,
    about: dict[str, Any],
    template: str | None,
) -> str | None:
    """Write the folder of a model; returns a note about its tokenizer."""
    configs, kept = configs_of(run.section), run.paths.path / FILES
    extra = tensors_beside(kept) if family.beside else None
    if family.beside and extra is None:
        tensors = ", ".join(family.beside)
        rule = f"needs {tensors}, and {run.paths.path} did not begin from a folder that has them"
        fix = "begin the run with forge-train import"
        raise invalid("--family", "requires", family.name, rule, fix)
    hf, files, note = _config_and_files(run, family.name, family.configs_to_hf(configs), template)
    named = str(dtype).removeprefix("torch.")
    files["config.json"] = as_json({**hf, "dtype": named, "torch_dtype": named})
    files[SIDECAR] = as_json({**about, "model": training_options(run.section)})
    rows = family.rows_of(configs)
    save_hf(out, rows, weights, dtype=dtype, keep=_KEEP, ignore=_IGNORE, files=files, extra=extra)
    return note


def _save_adapters(
    run: _Run,
    out: Path,
    family: HFFamily,
    weights: MergedTensors,
    dtype: torch.dtype,
    about: dict[str, Any],
    template: str | None,
) -> str | None:
    """Write a folder of peft; returns a note about its tokenizer."""
    lora, modules = run.lora, modules_of(run.section, family.name)
    base = _base_folder(run.paths)
    with config_errors("--adapter"):
        files, rows = peft_files(
            weights, family.rows_of(configs_of(run.section)), lora.rank, lora.alpha, base, modules
        )
    found, note = _tokenizing(run.data, template)
    # peft has no key for it
    files[SIDECAR] = as_json({**about, "base_dtype": lora.base_dtype})
    files |= {} if found is None else found.files()
    save_hf(out, rows, weights.factors(), dtype=dtype, files=files, stem="adapter_model")
    return note or (found and found.note)


def _require_adapters(run: _Run, check: bool) -> None:
    """ConfigError for a run without adapters, and for what a folder of peft cannot hold."""
    lora = run.lora
    whole = f"writes only low-rank matrices, and lora.whole {list(lora.whole)} are trained too"
    for key, code, wrong, rule in (
        ("--adapter", "whole", bool(lora.whole), whole),
        ("--check", "excludes", check, "compares full models, and --adapter writes none"),
        ("--adapter", "requires", not lora.rank, f"needs [lora], and {run.paths.path} has none"),
    ):
        if wrong:
            raise invalid(key, code, ..., rule, "leave it out", kind=ConfigError)


def _config_and_files(
    run: _Run, name: str, hf: dict[str, Any], template: str | None
) -> tuple[dict[str, Any], dict[str, bytes], str | None]:
    """(keys of config.json, other files, a note) of a run: `hf` over what it began with, and the tokenizer of the data."""
    original, kept, data = run.original, run.paths.path / FILES, run.data
    files = read_files(kept, ["*"]) if original else {}
    same = original if original.get("model_type") == name else {}
    found, lost = _tokenizing(data, template)
    other = _has_other_tokenizer(run.paths, found)
    if other:
        files = {n: content for n, content in files.items() if n.startswith("LICENSE")}
        same = {key: value for key, value in same.items() if not key.endswith("token_id")}
    # the token that fills up is the tokenizer's, not the model's
    hf = _merged(same, hf) | {k: v for k, v in same.items() if k == "pad_token_id"}
    if found is None:
        # conversations that cannot be read may have been written by another template than the folder's
        talks = data is not None and any(is_talks(source) for source in data.sources.values())
        return hf, files, lost if other or talks or not original else None
    if original and not found.talks and tokenizer_in(kept) is None:
        return hf, files, None  # the end token of the weights is that of an unknown tokenizer

    own, ids = found.files(), found.ids(kept)
    if found.talks or other or not original:
        old = read_files(kept, TOKENIZER_FILES) if original else {}
        files = {n: content for n, content in files.items() if n not in old} | own
    for table in (hf, hf.get("text_config")):
        if isinstance(table, dict):
            table |= ids
    before = json.loads(files.get(_GENERATION, b"{}"))
    if {**before, **ids} != before:
        files[_GENERATION] = as_json({**before, **ids})
    changed = "the tokenizer written is that of the data, not that of the weights"
    return hf, files, found.note or (changed if other else None)


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


def _read_run(run: RunDirectory) -> _Run:
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
    return _Run(run, section, built.get("data"), built.get("lora") or LoRASection())


def _has_other_tokenizer(run: RunDirectory, found: TokenizerFiles | None) -> bool:
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
) -> tuple[TokenizerFiles | None, str | None]:
    """The tokenizer of the data, or the reason why it is missing."""
    if data is None:
        return None, "no tokenizer is written: nothing was trained"
    try:
        return tokenizing_of(data, template), None
    except (ValueError, OSError, ImportError) as error:
        return None, f"no tokenizer is written: {error}"
