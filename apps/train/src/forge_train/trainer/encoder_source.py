"""`init.encoder`: the vision encoder of a run begins with the weights of a folder of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from forge_ckpt.hf import HFFolder, fill_tensor, read_json
from forge_resilience import Agreement
from forge_train.config.init import has_begun
from forge_train.config.schema import JobConfig
from forge_train.config.vlm import VLMModelConfig
from forge_train.errors import config_errors, refuse, run_on_all_ranks
from forge_train.hf.folder import processor_table
from forge_train.trainer.fork import Fork
from forge_vlm.vision import VisionConfig, encoder_differences, encoder_tensors

_PREFIX = "vision.model."


@dataclass(frozen=True)
class EncoderSource:
    """A folder that was compared with the job; nothing of it is loaded yet. `names` are {tensor of the model: tensor of the
    folder}, `unused` how many others the folder has."""

    path: Path
    names: Mapping[str, str]
    unused: int

    def load(self, model: nn.Module, agreement: Agreement) -> None:
        """Fill the encoder of this rank's part of the model; each rank reads whole tensors, one at a time. Collective."""
        run_on_all_ranks(agreement, lambda: self._fill(model))

    def _fill(self, model: nn.Module) -> None:
        state, folder = model.state_dict(), HFFolder(self.path)
        for name, theirs in self.names.items():
            if name in state:  # a later stage of a pipeline has no encoder
                fill_tensor(name, state[name], folder.read(theirs))

    def line(self) -> str:
        """What a person should know of it."""
        return f"encoder of {self.path}: {len(self.names)} tensors taken, {self.unused} of the folder unused"

    def event(self) -> dict[str, Any]:
        """Fields of the event `encoder`."""
        return {
            "folder": str(self.path.absolute()),
            "copied": len(self.names),
            "unused": self.unused,
        }


def find_encoder(config: JobConfig, model: nn.Module, fork: Fork | None) -> EncoderSource | None:
    """The folder that the encoder begins with; None where none is named, or the run has begun and goes on.

    `model` is the whole one, on the meta device or not. Reads headers and JSON. ConfigError with each key, tensor or shape
    that is another there, before anything is started.
    """
    if config.init.encoder is None or has_begun(Path(config.run.dir)):
        return None
    path, section = Path(config.init.encoder), config.model
    where = f"init.encoder {str(path)!r}"
    if not isinstance(section, VLMModelConfig) or section.vision.name != "transformers":
        refuse(
            [
                f"{where} is a folder of transformers, and the model has no encoder of model.vision.name 'transformers'; set it, "
                "or leave init.encoder out"
            ]
        )
    assert isinstance(section, VLMModelConfig)
    if fork is not None and any(name.startswith(_PREFIX) for name in fork.weights.copied):
        refuse(
            [
                f"{where} and init.from {config.init.from_!r} both have weights of the encoder; leave one out, or take the "
                "others alone, with init.patterns = ['*', '!vision.*']"
            ]
        )
    with config_errors():
        folder = HFFolder(path)
        problems = [
            f"model.{p}"
            for p in encoder_differences(section.vision, read_json(path / "config.json"))
        ]
        refuse([f"{where}: {p}" for p in [*problems, *_pixel_problems(section.vision, path)]])
        own = {
            n.removeprefix(_PREFIX): t
            for n, t in model.state_dict().items()
            if n.startswith(_PREFIX)
        }
        try:
            names = encoder_tensors(own, folder.entries)
        except ValueError as error:
            raise ValueError(f"{where} {error}") from error
        refuse([f"{where}: {p}" for p in _shape_problems(own, names, folder.meta())])
    taken = {_PREFIX + name: theirs for name, theirs in names.items()}
    return EncoderSource(path, taken, len(folder.entries) - len(taken))


def _shape_problems(
    own: Mapping[str, Tensor], names: Mapping[str, str], there: Mapping[str, Tensor]
) -> list[str]:
    return [
        f"{theirs} is {tuple(there[theirs].shape)} there and {tuple(own[name].shape)} in the model; build the model of this folder"
        for name, theirs in names.items()
        if there[theirs].shape != own[name].shape
    ]


def _pixel_problems(vision: VisionConfig, path: Path) -> list[str]:
    """Of the numbers by which the folder's own processor normalises pixels, where it has one."""
    table = processor_table(path)
    return [
        f"model.vision.{key} {list(own)} is {table[theirs]} for the processor of the folder; use it"
        for key, theirs, own in zip(("mean", "std"), ("image_mean", "image_std"), vision.pixels)
        if isinstance(table.get(theirs), list)
        and [round(v, 6) for v in table[theirs]] != [round(v, 6) for v in own]
    ]
