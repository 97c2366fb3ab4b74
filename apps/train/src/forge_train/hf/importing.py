"""`forge-train import`: a folder of Hugging Face becomes step 0 of a run."""

from __future__ import annotations

from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

from torch import nn
from tyro.conf import Positional, arg

from forge_ckpt.hf import BOUND, compare_logits, notes_of, store_hf, why_not_compared
from forge_data import load_tokenizer
from forge_train._shared.problems import invalid
from forge_train.build.build import build_model
from forge_train.build.hf_models import HFModel, read_model
from forge_train.build.run_directory import RunDirectory
from forge_train.config.init import NAME
from forge_train.config.model import VLMModelConfig
from forge_train.errors import ConfigError, JobError, config_errors, write_errors
from forge_train.run.checkpoints import IMPORTED, store_errors
from forge_vlm.families import inputs_of


def import_folder(
    hf_dir: Annotated[Positional[Path], arg(help="folder with config.json and safetensors, as save_pretrained writes it")],
    /,
    run_dir: Annotated[Path, arg(name="run.dir", help="folder of a new run: its step 0 are these weights")],
    check: Annotated[
        bool, arg(help="compare logits with those of transformers first, where it is installed and memory holds both models")
    ] = True,
    vocab_size: Annotated[
        int | None,
        arg(name="init.vocab_size", help="rows of embedding and head where tokens were added to the tokenizer; each that the "
            "folder lacks is the mean of its own"),
    ] = None,
) -> int:  # fmt: skip
    """Write the weights of a Hugging Face folder as step 0 of a new run, and its [model] table.

    Nothing is written where logits differ from those of transformers.

    `forge-train run job.toml --run.dir DIR` then trains from them, in any layout.
    """
    paths = RunDirectory(run_dir)
    model = read_model(hf_dir, vocab_size)
    source = model.tensors()
    if found := source.problems(build_model(model.section, 0).state_dict()):
        raise ConfigError(found, str(hf_dir))
    if paths.config.exists() or paths.has_checkpoints():
        rule, fix = "must be a new folder, and has a run already", "choose another run.dir"
        raise invalid("run.dir", "exists", str(run_dir), rule, fix, kind=ConfigError)
    kept = model.files()
    if check:
        reason = why_not_compared(source.meta.values())
        # without rows that are added
        print(f"not checked: {reason}" if reason else check_folder(hf_dir))
    paths.create(0)
    family = model.family.name
    with store_errors(paths.checkpoints, JobError):
        store_hf(paths.checkpoints, 0, source, about={IMPORTED: {"model_type": family}})
    with write_errors("run.dir", run_dir, "make room", JobError):
        model.write(paths.path, kept)
    print(f"imported {len(source.meta)} tensors of {family} into {paths.checkpoints} as step 0")
    lines = [*notes_of(model, source.ignored), *_tokens_beyond(hf_dir, model.section.vocab_size)]
    run = f"train: forge-train run JOB.toml --run.dir {run_dir}"
    print(*lines, f"{run}   (its [model] is {paths.path / NAME})", sep="\n")
    return 0


def check_folder(folder: Path) -> str:
    """`check_logits` of the weights of a folder."""
    found = read_model(folder)
    return check_logits(found.build(), found)


def check_logits(model: nn.Module, found: HFModel) -> str:
    """A line about the largest difference of logits between a model and the one that transformers makes of its folder.

    Both compute in fp32 on the CPU and are held at once. ConfigError where transformers is not installed or
    cannot load the folder, JobError for logits that differ by more than rounding.
    """
    kind = "ImageTextToText" if isinstance(found.section, VLMModelConfig) else "CausalLM"
    inputs = partial(inputs_of, model, found.section)
    with config_errors("--check"):
        relative, line = compare_logits(model, found.path, inputs, kind)
    if not relative <= BOUND:  # nan too
        rule, fix = f"must be at most {BOUND} of the largest logit ({line})", "do not use this copy"
        raise invalid("difference", "range", relative, rule, fix, where=found.path, kind=JobError)
    return line


def _tokens_beyond(folder: Path, rows: int) -> list[str]:
    """A line about tokens of the folder's tokenizer for which the model has no row; none without any."""
    try:
        found: Any = load_tokenizer(str(folder / "tokenizer.json"))
    except (ValueError, OSError, ImportError):  # none that can be read: data of it names the reason
        return []
    names = [n for n, i in sorted(found.vocabulary().items(), key=itemgetter(1)) if i >= rows]
    shown = ", ".join(names[:3]) + ", ..." * (len(names) > 3)
    line = (
        f"{len(names)} tokens of its tokenizer have no row in the model: {shown}. Text with them needs an import with "
        f"--init.vocab_size {found.vocab_size}"
    )
    return [line] * bool(names)
