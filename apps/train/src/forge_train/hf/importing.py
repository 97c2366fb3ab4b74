"""`forge-train import`: a folder of Hugging Face becomes step 0 of a run."""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import tyro

from forge_ckpt.hf import store_hf
from forge_data import load_tokenizer
from forge_train._shared.problems import invalid
from forge_train.config.imported import NAME
from forge_train.errors import ConfigError, JobError, config_errors
from forge_train.hf.compare import compare, why_not_compared
from forge_train.hf.folder import notes_of, read_model
from forge_train.trainer.build import build_model
from forge_train.trainer.checkpoints import IMPORTED
from forge_train.trainer.run_directory import RunDirectory
from forge_train.trainer.store_errors import store_errors


def import_folder(
    hf_dir: Annotated[
        tyro.conf.Positional[Path],
        tyro.conf.arg(help="folder with config.json and safetensors, as save_pretrained writes it"),
    ],
    /,
    run_dir: Annotated[
        Path,
        tyro.conf.arg(name="run.dir", help="folder of a new run: its step 0 are these weights"),
    ],
    check: Annotated[
        bool,
        tyro.conf.arg(
            help="compare logits with those of transformers first, where it is installed and memory holds both models"
        ),
    ] = True,
    vocab_size: Annotated[
        int | None,
        tyro.conf.arg(
            name="init.vocab_size",
            help="rows of embedding and head where tokens were added to the tokenizer; each that the folder lacks is the "
            "mean of its own",
        ),
    ] = None,
) -> int:
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
        print(_checked(hf_dir))
    paths.create(0)
    with store_errors(paths.checkpoints, JobError):
        store_hf(paths.checkpoints, 0, source, about={IMPORTED: {"model_type": model.family}})
    try:
        model.write(paths.path, kept)
    except OSError as error:
        rule = f"cannot be written ({error.strerror})"
        raise invalid("run.dir", "write", str(run_dir), rule, "make room", kind=JobError) from error
    count = len(source.meta)
    print(f"imported {count} tensors of {model.family} into {paths.checkpoints} as step 0")
    for note in notes_of(model, source.ignored):
        print(note)
    if beyond := _tokens_beyond(hf_dir, model.section.vocab_size):
        print(beyond)
    print(
        f"train: forge-train run JOB.toml --run.dir {run_dir}   (its [model] is {paths.path / NAME})"
    )
    return 0


def _checked(folder: Path) -> str:
    """How logits of the folder's model, without rows that are added, compare with those of transformers, or why not."""
    model = read_model(folder)
    if reason := why_not_compared(model.section):
        return f"not checked: {reason}"
    with config_errors():
        return compare(model.section, model.tensors(), folder)


def _tokens_beyond(folder: Path, rows: int) -> str:
    """A line about tokens of the folder's tokenizer for which the model has no row; "" without any."""
    try:
        found: Any = load_tokenizer(str(folder / "tokenizer.json"))
    except (ValueError, OSError, ImportError):  # none that can be read: data of it names the reason
        return ""
    names = [
        name
        for name, number in sorted(found.vocabulary().items(), key=itemgetter(1))
        if number >= rows
    ]
    if not names:
        return ""
    shown = ", ".join(names[:3]) + ", ..." * (len(names) > 3)
    return (
        f"{len(names)} tokens of its tokenizer have no row in the model: {shown}. Text with them needs an import with "
        f"--init.vocab_size {found.vocab_size}"
    )
