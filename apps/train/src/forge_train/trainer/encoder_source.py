"""`init.encoder`: the vision encoder of a run begins with the weights of a folder of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from forge_ckpt.hf import HFFolder, fill_tensor, read_json, read_processor
from forge_resilience import Agreement
from forge_train._shared.paths import user_path
from forge_train._shared.problems import invalid, problems_of, raise_problems
from forge_train.config.init import has_begun
from forge_train.config.schema import JobConfig
from forge_train.config.vlm import VLMModelConfig
from forge_train.errors import ConfigError, config_errors, run_on_all_ranks
from forge_train.trainer.fork import Fork
from forge_vlm.vision import (
    encoder_differences,
    encoder_tensors,
    pixel_differences,
    shape_differences,
)

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
    path, section = user_path(config.init.encoder), config.model
    key, where = "init.encoder", f"init.encoder {str(path)!r}"
    if not isinstance(section, VLMModelConfig) or section.vision.name != "transformers":
        rule = "is a folder of transformers, and the model has no encoder of model.vision.name 'transformers'"
        raise invalid(
            key, "encoder", str(path), rule, "set it, or leave init.encoder out", kind=ConfigError
        )
    if fork is not None and any(name.startswith(_PREFIX) for name in fork.weights.copied):
        rule = f"and init.from {config.init.from_!r} both have weights of the encoder"
        fix = "leave one out, or take only the others, with init.patterns = ['*', '!vision.*']"
        raise invalid(key, "excludes", str(path), rule, fix, kind=ConfigError)
    own = {
        n.removeprefix(_PREFIX): t for n, t in model.state_dict().items() if n.startswith(_PREFIX)
    }
    with config_errors():
        folder = HFFolder(path)
        problems: list[Any] = encoder_differences(section.vision, read_json(path / "config.json"))
        problems += pixel_differences(section.vision, read_processor(path))
        raise_problems(where, [p.under("model") for p in problems], ConfigError)
        try:
            names = encoder_tensors(own, folder.entries)
        except ValueError as error:
            found = [replace(p.under(key), value=str(path)) for p in problems_of(error)]
            raise ConfigError(found) from error
        wrong: list[Any] = shape_differences(names, own, folder.meta())
        raise_problems(where, wrong, ConfigError)
    taken = {_PREFIX + name: theirs for name, theirs in names.items()}
    return EncoderSource(path, taken, len(folder.entries) - len(taken))
