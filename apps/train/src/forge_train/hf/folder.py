"""A folder of Hugging Face as the [model] of a job: its table, its weights, and the files that belong to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import forge_ckpt.hf
from forge_ckpt.hf import HFTensors, read_json, read_processor
from forge_core import initialise
from forge_data.tokenizer_files import TOKENIZER_FILES
from forge_parallel import materialise
from forge_train._shared.problems import invalid
from forge_train.config.imported import FILES, NAME, TRAINING_KEYS, table_of, write_table
from forge_train.config.layers import Layers
from forge_train.config.structure import structure
from forge_train.config.vlm import VLMModelConfig
from forge_train.errors import ConfigError, config_errors
from forge_train.hf.families import section_of
from forge_train.trainer.build import build_model
from forge_vlm.vision import processor_pixels

__all__ = ["SIDECAR", "HFModel", "read_model"]

SIDECAR = "forge.json"


class HFModel(forge_ckpt.hf.HFModel):
    """The model of a folder as a job has it: `section` is its [model], `table` the same as flat keys below it.

    ConfigError with a line for each key that cannot be held. `vocab_size` adds rows for tokens that the tokenizer has and
    the model has not.
    """

    def __init__(self, folder: Path, vocab_size: int | None = None) -> None:
        with config_errors():
            super().__init__(folder)
            section = section_of(self.configs)
            if isinstance(section, VLMModelConfig):
                pixels: Any = processor_pixels(read_processor(folder))
                section = replace(section, vision=replace(section.vision, **pixels))
            self.table = table_of(section, _sidecar(folder / SIDECAR))
            _, problems = structure(self.layer())
        # the only part of the table that is not ours is the sidecar's
        if own := [problem for problem in problems if problem.key.startswith("model")]:
            raise ConfigError(own, str(folder / SIDECAR))
        if vocab_size is not None:
            with config_errors("init"):
                self.add_rows(vocab_size)
            section = replace(section, vocab_size=vocab_size)
            self.table["vocab_size"] = vocab_size
        self.section = section

    def tensors(self) -> HFTensors:
        """The weights under Forge's names; ConfigError for what the family's maps cannot hold."""
        with config_errors():
            return super().tensors()

    def build(self, device: torch.device | str = "cpu") -> nn.Module:
        """The model in eval mode with the weights in fp32; ConfigError for tensors that do not fit."""
        model = materialise(build_model(self.section, 0), torch.device(device))
        initialise(model, 0)  # buffers that the folder need not hold
        with config_errors():
            self.load(model)
        return model.eval()

    def layer(self) -> dict[str, Any]:
        """{"model": table}, as a file of TOML would hold it."""
        layers = Layers()
        for key, value in self.table.items():
            layers.set(f"model.{key}", "none" if value is None else value, "import")
        return layers.values

    def files(self, more: Sequence[str] = TOKENIZER_FILES) -> dict[str, bytes]:
        """The files that belong to the model, by name; ConfigError for one that is no such file by its size."""
        with config_errors():
            return super().files(more)

    def write(self, run_dir: Path, files: dict[str, bytes]) -> None:
        """Write model.toml, which jobs there get their [model] from, and what an export gives back: files, and tensors
        of the folder that are no part of the model."""
        (run_dir / FILES).mkdir(exist_ok=True)
        self.keep_beside(run_dir / FILES)
        for name, content in files.items():
            (run_dir / FILES / name).write_bytes(content)
        write_table(
            run_dir / NAME, self.layer(), "The model of the imported weights; jobs here get it"
        )


read_model = HFModel


def _sidecar(path: Path) -> dict[str, Any]:
    """Options of training that an export of Forge wrote beside; none without one."""
    if not path.exists():
        return {}
    table = read_json(path)
    model = table.get("model")
    if table.get("format") != 1 or not isinstance(model, dict) or not model.keys() <= TRAINING_KEYS:
        rule = f"must have format 1 and a table model of {', '.join(sorted(TRAINING_KEYS))}"
        fix = "remove the file, or use the version that wrote it"
        raise invalid("", "version", ..., rule, fix, where=path)
    return model
