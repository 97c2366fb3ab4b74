"""`forge-train import`: a folder of Hugging Face becomes step 0 of a run."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import tyro

from forge_ckpt.hf import HFTensors, read_json, store_hf
from forge_train.config.imported import NAME, TRAINING_KEYS, table_of, write_table
from forge_train.config.layers import Layers
from forge_train.config.schema import BuiltInModelConfig
from forge_train.config.structure import structure
from forge_train.errors import ConfigError, JobError, config_errors, refuse
from forge_train.hf.compare import compare
from forge_train.hf.families import rows_of, section_from_hf
from forge_train.trainer.build import build_model
from forge_train.trainer.checkpoints import IMPORTED, store_errors
from forge_train.trainer.run_directory import RunDirectory

#: In a run directory: files of the imported folder that an export gives back.
FILES = "hf"
SIDECAR = "forge.json"
#: Files beside the weights that belong to the model: configuration, tokenizer, license.
_KEPT = (
    *("config.json", "generation_config.json", "tokenizer*.json", "tokenizer.model", "vocab.*"),
    *(
        "merges.txt",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.*",
        "*.tiktoken",
    ),
    *("LICENSE*", "spiece.model"),
)
_MAX_BYTES = 2**28


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
        tyro.conf.arg(help="run both models on the same tokens, and print how much logits differ"),
    ] = False,
) -> int:
    """Write the weights of a Hugging Face folder as step 0 of a new run, and its [model] table.

    `forge-train run job.toml --run.dir DIR` then trains from them, in any layout.
    """
    paths = RunDirectory(run_dir)
    with config_errors():
        hf = read_json(hf_dir / "config.json")
        section = section_from_hf(hf)
        table = table_of(section, _sidecar(hf_dir / SIDECAR))
        refuse(_table_problems(table, hf_dir / SIDECAR))
        family = hf["model_type"]
        source = HFTensors(hf_dir, rows_of(section, family), _ignored(section, hf))
        refuse([f"{hf_dir}: {p}" for p in source.differences(build_model(section, 0).state_dict())])
    if paths.config.exists() or paths.has_checkpoints():
        raise ConfigError(
            [
                f"run.dir {run_dir} has a run already and must be a new folder; choose another run.dir"
            ]
        )
    kept = _kept_files(hf_dir)
    paths.create(0)
    with store_errors(paths.checkpoints, JobError):
        store_hf(paths.checkpoints, 0, source, about={IMPORTED: {"model_type": family}})
    try:
        (paths.path / FILES).mkdir(exist_ok=True)
        for name, content in kept.items():
            (paths.path / FILES / name).write_bytes(content)
        write_table(paths.path / NAME, table, "The model of the imported weights; jobs here get it")
    except OSError as error:
        raise JobError(
            [f"run.dir {run_dir} cannot be written ({error.strerror}); make room"]
        ) from error
    count = len(source.meta)
    print(f"imported {count} tensors of {family} into {paths.checkpoints} as step 0")
    if source.ignored:
        names = ", ".join(source.ignored[:3]) + ", ..." * (len(source.ignored) > 3)
        print(f"left out, as the model does not use them: {names} ({len(source.ignored)})")
    if check:
        print(compare(section, source, hf_dir))
    print(
        f"train: forge-train run JOB.toml --run.dir {run_dir}   (its [model] is {paths.path / NAME})"
    )
    return 0


def _ignored(section: BuiltInModelConfig, hf: dict[str, Any]) -> list[str]:
    """Patterns of tensors that transformers does not load either: they change no logits."""
    extra = hf.get("num_nextn_predict_layers")
    count = extra if type(extra) is int and 0 < extra < 64 else 0
    layers = range(section.num_layers, section.num_layers + count)
    return [
        "*.rotary_emb.inv_freq",
        *(["lm_head.weight"] if section.tie_embeddings else []),
        *(f"model.layers.{layer}.*" for layer in layers),  # multi-token prediction
    ]


def _sidecar(path: Path) -> dict[str, Any]:
    """Options of training that an export of Forge wrote beside; none without one."""
    if not path.exists():
        return {}
    table = read_json(path)
    model = table.get("model")
    if table.get("format") != 1 or not isinstance(model, dict) or not model.keys() <= TRAINING_KEYS:
        raise ValueError(
            f"{path}: must have format 1 and a table model of {', '.join(sorted(TRAINING_KEYS))}; remove the "
            "file, or use the version that wrote it"
        )
    return model


def _table_problems(table: dict[str, Any], sidecar: Path) -> list[str]:
    """Why jobs could not read the table; the only part of it that is not ours is the sidecar's."""
    layers = Layers()
    for key, value in table.items():
        layers.set(f"model.{key}", "none" if value is None else value, "import")
    _, problems = structure(layers.values)
    return [f"{sidecar}: {problem}" for problem in problems if problem.startswith("model")]


def _kept_files(folder: Path) -> dict[str, bytes]:
    found = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and any(fnmatchcase(path.name, pattern) for pattern in _KEPT):
            if path.stat().st_size > _MAX_BYTES:
                raise ConfigError(
                    [f"{path}: more than {_MAX_BYTES} bytes; remove it, or name another"]
                )
            found[path.name] = path.read_bytes()
    return found
