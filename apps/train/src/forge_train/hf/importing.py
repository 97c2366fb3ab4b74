"""`forge-train import`: a folder of Hugging Face becomes step 0 of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from forge_ckpt.hf import store_hf
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
) -> int:
    """Write the weights of a Hugging Face folder as step 0 of a new run, and its [model] table.

    Nothing is written where logits differ from those of transformers.

    `forge-train run job.toml --run.dir DIR` then trains from them, in any layout.
    """
    paths = RunDirectory(run_dir)
    model = read_model(hf_dir)
    source = model.tensors()
    if found := source.problems(build_model(model.section, 0).state_dict()):
        raise ConfigError(found, str(hf_dir))
    if paths.config.exists() or paths.has_checkpoints():
        rule, fix = "must be a new folder, and has a run already", "choose another run.dir"
        raise invalid("run.dir", "exists", str(run_dir), rule, fix, kind=ConfigError)
    kept = model.files()
    if check:
        reason = why_not_compared(model.section)
        with config_errors():
            print(f"not checked: {reason}" if reason else compare(model.section, source, hf_dir))
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
    print(
        f"train: forge-train run JOB.toml --run.dir {run_dir}   (its [model] is {paths.path / NAME})"
    )
    return 0
