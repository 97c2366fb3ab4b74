"""`init.encoder`: the vision encoder of a run begins with the weights of a folder of Hugging Face."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from forge_ckpt.hf import HFFolder, fill_tensor, read_json
from forge_resilience import Agreement
from forge_train._shared.paths import user_path
from forge_train._shared.problems import Problem, invalid, problems_of, raise_problems
from forge_train.config.init import has_begun
from forge_train.config.schema import JobConfig
from forge_train.config.vlm import VLMModelConfig
from forge_train.errors import ConfigError, config_errors, run_on_all_ranks
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
    with config_errors():
        folder = HFFolder(path)
        differences = encoder_differences(section.vision, read_json(path / "config.json"))
        problems: list[Any] = [problem.under("model") for problem in differences]
        problems += _pixel_problems(section.vision, path)
        raise_problems(where, problems, ConfigError)
        own = {
            n.removeprefix(_PREFIX): t
            for n, t in model.state_dict().items()
            if n.startswith(_PREFIX)
        }
        try:
            names = encoder_tensors(own, folder.entries)
        except ValueError as error:
            found = [replace(p.under(key), value=str(path)) for p in problems_of(error)]
            raise ConfigError(found) from error
        raise_problems(where, _shape_problems(own, names, folder.meta()), ConfigError)
    taken = {_PREFIX + name: theirs for name, theirs in names.items()}
    return EncoderSource(path, taken, len(folder.entries) - len(taken))


def _shape_problems(
    own: Mapping[str, Tensor], names: Mapping[str, str], there: Mapping[str, Tensor]
) -> Iterator[Problem]:
    for name, theirs in names.items():
        shape, wanted = tuple(there[theirs].shape), tuple(own[name].shape)
        if shape != wanted:
            rule, fix = f"must be {wanted}, as in the model", "build the model of this folder"
            yield Problem(theirs, "shape", shape, rule, fix)


def _pixel_problems(vision: VisionConfig, path: Path) -> list[Problem]:
    """Of the numbers by which the folder's own processor normalises pixels, where it has one."""
    table = processor_table(path)
    rule = "is {} for the processor of the folder"
    return [
        Problem(f"model.vision.{key}", "processor", list(own), rule.format(table[theirs]), "use it")
        for key, theirs, own in zip(("mean", "std"), ("image_mean", "image_std"), vision.pixels)
        if isinstance(table.get(theirs), list)
        and [round(v, 6) for v in table[theirs]] != [round(v, 6) for v in own]
    ]
