"""`forge-train export`: a checkpoint of a run, of any layout, becomes a folder of Hugging Face."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from tyro.conf import Positional, arg

from forge_ckpt.hf import (
    HFFamily,
    MergedTensors,
    merged_config,
    peft_files,
    read_files,
    read_json,
    save_hf,
    tensors_beside,
)
from forge_data import DataConfig, SourceConfig, load_tokenizer
from forge_data.run_checks import tokenizer_of
from forge_data.tokenizer_files import (
    ChatTemplate,
    TokenizerFiles,
    as_json,
    gives_same_ids,
    tokenizer_in,
)
from forge_train._shared.bars import progress_bar
from forge_train._shared.problems import invalid
from forge_train._shared.toml_files import read_toml
from forge_train.build.hf_models import SIDECAR, configs_of, family_of, modules_of
from forge_train.build.run_directory import RunDirectory
from forge_train.config.evaluation import KINDS
from forge_train.config.imported import training_options
from forge_train.config.init import FILES, NAME
from forge_train.config.layers import read_layers
from forge_train.config.model import BuiltInModelConfig, LoRASection
from forge_train.config.structure import structure
from forge_train.errors import ConfigError, JobError, config_errors
from forge_train.hf.importing import check_folder
from forge_train.run.checkpoints import store_errors
from forge_vlm.data import Prompts


def is_talks(source: SourceConfig) -> bool:
    """Whether a source contains conversations."""
    return source.name == "chat" or source.name in KINDS


def tokenizing_of(data: DataConfig, chosen: str | None) -> TokenizerFiles:
    """The tokenizer files of the source `chosen`, else of the conversations, else of the first source.

    Raises ConfigError for a source without conversations, and for conversations of several templates of which none is
    chosen; ValueError, OSError and ImportError for files and packages that are missing.
    """
    talks = {n: s for n, s in data.sources.items() if is_talks(s)}
    if chosen is not None and chosen not in talks:
        rule = f"must be a source of conversations: {', '.join(talks) or 'the run has none'}"
        raise invalid("--template", "unknown", chosen, rule, "name one", kind=ConfigError)
    if not talks:
        return TokenizerFiles(tokenizer_of(next(iter(data.sources.values()))))
    found = {name: _of_talks(talks[name]) for name in ([chosen] if chosen else talks)}
    first, *others = found.values()
    if any(other.identity() != first.identity() for other in others):
        rule = "is not given, and these sources write conversations differently"
        fix = f"name the source whose template is exported: --template {next(iter(found))}"
        raise invalid("--template", "several", [*found], rule, fix, kind=ConfigError)
    return first


def _of_talks(source: SourceConfig) -> TokenizerFiles:
    if source.name == "chat":
        chat = ChatTemplate(source.chat)
        return TokenizerFiles(load_tokenizer(chat.spec()), chat.template, True)
    prompts = Prompts.of_source(source.path or "", **source.options)
    return TokenizerFiles(load_tokenizer(prompts.tokens.spec or {}), prompts.jinja(), True)


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
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
    source: Annotated[Positional[Path], arg(help="folder of a run, or one of its checkpoints (.../step-00000100)")],
    out: Annotated[Positional[Path], arg(help="new folder to write")],
    /,
    step: Annotated[int | None, arg(help="checkpoint of the run; without it the newest")] = None,
    dtype: Annotated[Literal["fp32", "bf16", "fp16"], arg(help="of the floating-point tensors written")] = "fp32",
    family: Annotated[str | None, arg(help="of transformers; without it that of the import, or the first that fits")] = None,
    adapter: Annotated[bool, arg(help="write the adapters of [lora] alone, as a folder that peft loads")] = False,
    check: Annotated[bool, arg(help="run both models on the same tokens, and print how much logits differ")] = False,
    template: Annotated[
        str | None, arg(help="source of conversations whose tokenizer and chat template are written; needed where sources differ")
    ] = None,
) -> int:  # fmt: skip
    """Write a checkpoint as a folder that transformers loads: weights, config.json, tokenizer with the chat template and
    the end tokens of training.

    Any layout of ranks may have saved it. The model is never held whole, unless --check runs it. Adapters are added to
    the weights.
    """
    paths, checkpoint = _find(source, step)
    run = _read_run(paths)
    about: dict[str, Any] = {"format": 1, "step": int(checkpoint.absolute().name[5:])}
    section, lora = run.section, run.lora

    if adapter:
        _require_adapters(run, check)

    with store_errors(checkpoint, JobError), config_errors(), contextlib.ExitStack() as opened:
        found = family_of(section, family, run.original.get("model_type"))
        weights: Any = checkpoint
        if lora.adapters is not None:
            weights = MergedTensors(checkpoint, paths.base, lora.adapters.scale)
            opened.enter_context(weights)

        if adapter:
            options, note = _adapters(run, found, weights, template)
            about |= {"base_dtype": lora.base_dtype}  # peft has no key for it
            lines = [
                f"exported the adapters of {checkpoint} to {out}: {found.name}, rank {lora.rank}",
                f"the base weights were {lora.base_dtype} in training: give peft the same",
            ]
        else:
            options, note = _model(run, found, weights, dtype, template)
            about |= {"model": training_options(section)}
            lines = [f"exported {checkpoint} to {out}: {found.name}, {dtype}"]
            if depth := section.mtp.num_modules:
                lines.append(f"left out, as transformers has no place for it: mtp ({depth})")

        options["files"][SIDECAR] = as_json(about)
        show = opened.enter_context(progress_bar("export"))
        save_hf(out, dtype=_DTYPES[dtype], progress=show, **options)

    print(*lines, *([note] if note else []), sep="\n")
    if check:
        print(check_folder(out))
    return 0


def _model(
    run: _Run, family: HFFamily, weights: Any, dtype: str, template: str | None
) -> tuple[dict[str, Any], str | None]:
    """(arguments of save_hf, a note about the tokenizer) for the folder of a model."""
    configs, kept = configs_of(run.section), run.paths.path / FILES
    extra = tensors_beside(kept) if family.beside else None
    if family.beside and extra is None:
        tensors = ", ".join(family.beside)
        rule = f"needs {tensors}, and {run.paths.path} did not begin from a folder that has them"
        fix = "begin the run with forge-train import"
        raise invalid("--family", "requires", family.name, rule, fix)
    hf, files, note = _config_and_files(run, family.name, family.configs_to_hf(configs), template)
    named = str(_DTYPES[dtype]).removeprefix("torch.")
    files["config.json"] = as_json({**hf, "dtype": named, "torch_dtype": named})
    options = {"maps": family.rows_of(configs), "source": weights, "files": files, "extra": extra}
    return {**options, "keep": _KEEP, "ignore": _IGNORE}, note


def _adapters(
    run: _Run, family: HFFamily, weights: MergedTensors, template: str | None
) -> tuple[dict[str, Any], str | None]:
    """(arguments of save_hf, a note about the tokenizer) for a folder of peft."""
    rows, modules = family.rows_of(configs_of(run.section)), modules_of(run.section, family.name)
    base = _base_folder(run.paths)
    with config_errors("--adapter"):
        files, maps = peft_files(weights, rows, run.lora.rank, run.lora.alpha, base, modules)
    found, note = _tokenizing(run.data, template)
    files |= {} if found is None else found.files()
    options = {"maps": maps, "source": weights.factors(), "files": files, "stem": "adapter_model"}
    return options, note or (found and found.note)


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
    original, kept = run.original, run.paths.path / FILES
    found, lost = _tokenizing(run.data, template)
    other = _has_other_tokenizer(run.paths, found)
    files = read_files(kept, ["LICENSE*" if other else "*"]) if original else {}
    same = original if original.get("model_type") == name else {}
    if other:
        same = {key: value for key, value in same.items() if not key.endswith("token_id")}
    hf = merged_config(same, hf)
    if found is None:
        # conversations that cannot be read may have been written by another template than the folder's
        talks = run.data is not None and any(map(is_talks, run.data.sources.values()))
        return hf, files, lost if other or talks or not original else None
    if original and not found.talks and tokenizer_in(kept) is None:
        return hf, files, None  # the end token of the weights is that of an unknown tokenizer
    found.put(hf, files, kept, with_files=found.talks or other or not original)
    changed = "the tokenizer written is that of the data, not that of the weights"
    return hf, files, found.note or (changed if other else None)


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
    """Find the run and the checkpoint of `source` and --step. ConfigError without one."""
    at = source.absolute()
    inside = re.fullmatch(r"step-\d+", at.name) is not None
    of_store = at.parent if at.name == "checkpoints" else source
    run = RunDirectory(at.parent.parent if inside else of_store)

    steps = run.committed()
    with config_errors():
        if inside and step is not None:
            rule = f"and the checkpoint {source} are both given"
            raise invalid("--step", "excludes", step, rule, "leave one out")
        if inside and not (source / "manifest.json").is_file():
            rule = "is not a committed checkpoint"
            raise invalid("source", "damaged", str(source), rule, "name another")
        if not inside and not steps:
            rule, fix = "has no checkpoint", "name the folder of a run, or a checkpoint in it"
            raise invalid("source", "not_found", str(source), rule, fix)
        if not inside and step is not None and step not in steps:
            rule = f"must be one of {sorted(steps)}, the checkpoints of {source}"
            raise invalid("--step", "unknown", step, rule, "use one")
    return run, source if inside else run.checkpoint(max(steps) if step is None else step)


def _read_run(run: RunDirectory) -> _Run:
    path = next((p for p in (run.config, run.path / NAME) if p.exists()), None)
    if path is None:
        rule = f"has no {run.config.name} and no {NAME}, which describe the model"
        raise invalid("source", "model", str(run.path), rule, "restore one", kind=ConfigError)
    values = read_layers(path).values
    built, problems = structure({k: values[k] for k in ("model", "data", "lora") if k in values})
    if own := [problem for problem in problems if problem.key.startswith("model")]:
        raise ConfigError(own, str(path))
    section = built["model"]
    if not isinstance(section, BuiltInModelConfig):
        rule = "must be 'transformer': families hold the built-in model"
        fix = "write rows of your own and use forge_ckpt.hf.save_hf"
        raise invalid("model.name", "unsupported", section.name, rule, fix, kind=ConfigError)
    return _Run(run, section, built.get("data"), built.get("lora") or LoRASection())


def _has_other_tokenizer(run: RunDirectory, found: TokenizerFiles | None) -> bool:
    """Whether the data was made with another tokenizer than the one next to the weights.

    For data that cannot be read, init.other_tokenizer of the configuration decides.
    """
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
