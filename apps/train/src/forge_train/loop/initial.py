"""Initial state of a run without a checkpoint: the state of another run, and a folder of Hugging Face for its encoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from forge_ckpt.hf import HFFolder, fill_part, read_json, read_processor
from forge_resilience import Agreement
from forge_train._shared.paths import user_path
from forge_train._shared.problems import invalid, problems_of
from forge_train.config.init import has_begun
from forge_train.config.model import VLMModelConfig
from forge_train.config.schema import JobConfig
from forge_train.errors import ConfigError, config_errors, run_on_all_ranks
from forge_train.loop.fork import Fork, find_fork
from forge_train.run.checkpoints import Check
from forge_train.run.run import Run
from forge_vlm import vision

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
        run_on_all_ranks(agreement, lambda: fill_part(model, HFFolder(self.path).read, self.names))

    def line(self) -> str:
        """A line for the terminal."""
        return f"encoder of {self.path}: {len(self.names)} tensors taken, {self.unused} of the folder unused"

    def event(self) -> dict[str, Any]:
        """Fields of the event `encoder`."""
        folder = str(self.path.absolute())
        return {"folder": folder, "copied": len(self.names), "unused": self.unused}


def find_encoder(config: JobConfig, model: nn.Module, fork: Fork | None) -> EncoderSource | None:
    """The folder that the encoder begins with; None where none is named, or the run has begun and goes on.

    `model` is the whole one, on the meta device or not. Reads headers and JSON. ConfigError with each key, tensor or shape
    that is another there, before anything is started.
    """
    if config.init.encoder is None or has_begun(Path(config.run.dir)):
        return None

    path, section = user_path(config.init.encoder), config.model
    key = "init.encoder"
    if not isinstance(section, VLMModelConfig) or section.vision.name != "transformers":
        rule = "is a folder of transformers, and the model has no encoder of model.vision.name 'transformers'"
        fix = "set it, or leave init.encoder out"
        raise invalid(key, "encoder", str(path), rule, fix, kind=ConfigError)
    if fork is not None and any(name.startswith(_PREFIX) for name in fork.weights.copied):
        rule = f"and init.from {config.init.from_!r} both have weights of the encoder"
        fix = "leave one out, or take only the others, with init.patterns = ['*', '!vision.*']"
        raise invalid(key, "excludes", str(path), rule, fix, kind=ConfigError)

    state = {n: t for n, t in model.state_dict().items() if n.startswith(_PREFIX)}
    own = {name.removeprefix(_PREFIX): tensor for name, tensor in state.items()}

    with config_errors():
        there, hf = HFFolder(path).meta(), read_json(path / "config.json")
        processor = read_processor(path)
    try:
        names = vision.find_encoder(section.vision, own, hf, processor, there)
    except (ValueError, ImportError) as error:
        found = [_of_job(problem, path) for problem in problems_of(error)]
        raise ConfigError(found, f"init.encoder {str(path)!r}") from error

    taken = {_PREFIX + name: theirs for name, theirs in names.items()}
    return EncoderSource(path, taken, len(there) - len(taken))


def _of_job(problem: Any, path: Path) -> Any:
    """A problem of the encoder's config below [model], of the folder as one of init.encoder, of a tensor as it is."""
    if not problem.key:
        return replace(problem.under("init.encoder"), value=str(path))
    return problem if problem.code == "shape" else problem.under("model")


@dataclass
class Initial:
    """What the weights of a run without a checkpoint are from: [init], and the folder of its encoder."""

    fork: Fork | None
    encoder: EncoderSource | None

    @classmethod
    def find(cls, run: Run) -> Initial:
        """ConfigError for a source that does not fit the job; nothing of it is loaded."""
        fork = find_fork(run.job, run.model, run.loader, run.total_steps)
        return cls(fork, find_encoder(run.config, run.model, fork))

    def begin(self, run: Run) -> Callable[[dict[str, Any], Check], None] | None:
        """What fills the state of a run, collectively; None where all of it stays as built."""
        fork, encoder = self.fork, self.encoder

        def fill(state: dict[str, Any], check: Check) -> None:
            if fork is not None:
                fork.load(run, state, check)
            if encoder is not None:
                encoder.load(run.model, run.agreement)

        return None if fork is None and encoder is None else fill

    def drop(self) -> None:
        """The run had a checkpoint."""
        self.fork = self.encoder = None

    def record(self, run: Run, hosts: Sequence[str]) -> None:
        """Write into the run directory how this life of the run was made, and, of a fork, what from."""
        if self.fork is not None:
            self.fork.write(run.folder.path)
        parent = None if self.fork is None else self.fork.parent()
        run.folder.record(run.job, hosts, parent)
