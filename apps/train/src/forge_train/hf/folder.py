"""A folder of Hugging Face as a model of Forge: its [model] table, its tensors, and the files that belong to it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import nn

from forge_ckpt.hf import HFFolder, HFTensors, Row, load_hf, read_json
from forge_train._shared.problems import invalid
from forge_train.config.imported import FILES, NAME, TRAINING_KEYS, table_of, write_table
from forge_train.config.layers import Layers
from forge_train.config.schema import BuiltInModelConfig
from forge_train.config.structure import structure
from forge_train.config.vlm import VLMModelConfig
from forge_train.errors import ConfigError, config_errors
from forge_train.hf.beside import keep_beside
from forge_train.hf.families import beside_of, rows_of, section_from_hf

SIDECAR = "forge.json"
#: Files of a tokenizer of transformers, and its chat template.
TOKENIZER_FILES = (
    *("tokenizer*.json", "tokenizer.model", "vocab.*", "merges.txt", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.*", "*.tiktoken", "spiece.model"),
)
#: Files beside the weights that belong to the model: configuration, tokenizer, license.
_KEPT = (
    *("config.json", "generation_config.json", *TOKENIZER_FILES, "LICENSE*"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)
_MAX_BYTES = 2**28
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_TOWER = "vision_tower."
#: Tensors with a row for each token.
_OF_TOKENS = ("embedding.weight", "lm_head.weight", "lm_head.bias")


@dataclass(frozen=True)
class HFModel:
    """The model of a folder: `section` is its [model], `table` the same as flat keys below it.

    `vocab_size`: rows of embedding and head, of which those that the folder lacks are the mean of its own; None for its own.
    """

    path: Path
    hf: dict[str, Any]
    section: BuiltInModelConfig
    table: dict[str, Any]
    #: Whether config.json ties a head that the files have with other values, which `section` does not.
    untied: bool = False
    vocab_size: int | None = None

    @property
    def family(self) -> str:
        """The model_type of transformers."""
        return str(self.hf["model_type"])

    def tensors(self) -> HFTensors:
        """The weights under Forge's names; ConfigError for what the family's map cannot hold."""
        with config_errors():
            sizes = {} if self.vocab_size is None else dict.fromkeys(_OF_TOKENS, self.vocab_size)
            return HFTensors(self.path, *self._rows(), sizes)

    def load(self, model: nn.Module) -> None:
        """Fill a model of this section in place; ConfigError for tensors that do not fit."""
        with config_errors():
            rows, ignored = self._rows()
            load_hf(self.path, rows, model, ignore=ignored)

    def _rows(self) -> tuple[list[Row], list[str]]:
        """The rows of the family under the names that its files have, and patterns of tensors that are left out."""
        rows = rows_of(self.section, self.family)
        ignored = [
            *_ignored(self.section, self.hf, rows),
            *beside_of(self.section, self.family),
        ]
        return _named_as_in(HFFolder(self.path, ignored).entries, rows), ignored

    def layer(self) -> dict[str, Any]:
        """{"model": table}, as a file of TOML would hold it."""
        layers = Layers()
        for key, value in self.table.items():
            layers.set(f"model.{key}", "none" if value is None else value, "import")
        return layers.values

    def files(self) -> dict[str, bytes]:
        """The files that belong to the model, by name; ConfigError for one that is no such file by its size."""
        return files_in(self.path, _KEPT)

    def write(self, run_dir: Path, files: dict[str, bytes]) -> None:
        """Write model.toml, which jobs there get their [model] from, and what an export gives back: files, and tensors
        of the folder that are no part of the model."""
        (run_dir / FILES).mkdir(exist_ok=True)
        keep_beside(self.path, beside_of(self.section, self.family), run_dir / FILES)
        for name, content in files.items():
            (run_dir / FILES / name).write_bytes(content)
        write_table(
            run_dir / NAME, self.table, "The model of the imported weights; jobs here get it"
        )


def read_model(folder: Path, vocab_size: int | None = None) -> HFModel:
    """The model that `config.json` describes; ConfigError with a line for each key that cannot be held.

    `vocab_size` adds rows for tokens that the tokenizer has and the model has not: see `HFModel`.
    """
    with config_errors():
        hf = read_json(folder / "config.json")
        section = _with_pixels(section_from_hf(hf), folder)
        untied = section.tie_embeddings and _has_own_head(section, hf, folder)
        section = replace(section, tie_embeddings=section.tie_embeddings and not untied)
        table = table_of(section, _sidecar(folder / SIDECAR))
        model = HFModel(folder, hf, section, table, untied)
        _, problems = structure(model.layer())
        # the only part of the table that is not ours is the sidecar's
        if own := [problem for problem in problems if problem.key.startswith("model")]:
            raise ConfigError(own, str(folder / SIDECAR))
        return model if vocab_size is None else _with_rows(model, vocab_size)


def _with_rows(model: HFModel, size: int) -> HFModel:
    """A model of more tokens; ValueError for fewer, and for an embedding with rows that no token of text has."""
    key, least = "init.vocab_size", model.section.vocab_size
    if size < least:
        rule = f"must be at least {least}, the rows that {model.path} has"
        raise invalid(key, "range", size, rule, "leave it out, or use that of the tokenizer")
    if getattr(model.section, "input_only_ids", 0):
        rule = (
            f"cannot be set for {model.family}, whose ids after the vocabulary are those of images"
        )
        raise invalid(key, "unsupported", size, rule, "prepare the data with the model's tokenizer")
    section, table = replace(model.section, vocab_size=size), {**model.table, "vocab_size": size}
    return replace(model, section=section, table=table, vocab_size=size)


def _named_as_in(names: Collection[str], rows: Sequence[Row]) -> list[Row]:
    """The rows under the names that files have: those of a base model have no `model.` before them, and transformers 4
    wrote a vision tower's with `vision_model.` in them."""
    older = f"{_TOWER}vision_model."
    renamed = {} if any(n.startswith("model.") for n in names) else {"model.": ""}
    heads = [hf for hf, _, _ in rows if isinstance(hf, str)]
    if not any(h.startswith(older) for h in heads) and any(n.startswith(older) for n in names):
        renamed[_TOWER] = older

    def named(hf: str) -> str:
        old = next((old for old in renamed if hf.startswith(old)), "")
        return renamed.get(old, "") + hf.removeprefix(old)

    return [
        (named(hf) if isinstance(hf, str) else tuple(map(named, hf)), ours, ops)
        for hf, ours, ops in rows
    ]


def _has_own_head(section: BuiltInModelConfig, hf: dict[str, Any], folder: Path) -> bool:
    """Whether the files have a head that differs from the embedding. transformers 5 does not tie it then, whatever
    config.json says; 4 drops it."""
    rows = rows_of(section, str(hf["model_type"]))
    names = {ours: str(hf) for hf, ours, _ in rows}
    head, embedding = names["lm_head.weight"], names["embedding.weight"]
    try:
        source = HFFolder(folder, optional=[head])
    except ValueError:  # an error where the weights are read; a plan needs none
        return False
    there = [
        name for name in (embedding, embedding.removeprefix("model.")) if name in source.entries
    ]
    return head in source.entries and bool(there) and not source.same(head, there[0])


def _with_pixels(section: BuiltInModelConfig, folder: Path) -> BuiltInModelConfig:
    """A model with images, whose 8-bit ones are normalised as the folder's own processor does, where it has one."""
    if not isinstance(section, VLMModelConfig):
        return section
    table = processor_table(folder)
    given: dict[str, Any] = {
        ours: tuple(table[theirs])
        for ours, theirs in (("mean", "image_mean"), ("std", "image_std"))
        if isinstance(table.get(theirs), list)
    }
    return replace(section, vision=replace(section.vision, **given))


def processor_table(folder: Path) -> dict[str, Any]:
    """How the folder's image processor treats pictures; empty without one."""
    path = next((p for name in _PROCESSORS if (p := folder / name).is_file()), None)
    table: dict[str, Any] = {} if path is None else read_json(path)
    found: dict[str, Any] = table.get("image_processor", table)
    return found


def notes_of(model: HFModel, ignored: Sequence[str]) -> list[str]:
    """Lines about what is not taken as it stands in the folder."""
    untied = "tie_word_embeddings is true and lm_head.weight differs from the embedding: not tied, as in transformers 5"
    return [untied] * model.untied + [_left_out(ignored)] * bool(ignored)


def _left_out(ignored: Sequence[str]) -> str:
    names = ", ".join(ignored[:3]) + ", ..." * (len(ignored) > 3)
    return f"left out, as the model does not use them: {names} ({len(ignored)})"


def _ignored(section: BuiltInModelConfig, hf: dict[str, Any], rows: Sequence[Row]) -> list[str]:
    """Patterns of tensors that transformers does not load either: they change no logits."""
    extra = hf.get("num_nextn_predict_layers")
    count = extra if type(extra) is int and 0 < extra < 64 else 0
    layers = range(section.num_layers, section.num_layers + count)
    return [
        "*.rotary_emb.inv_freq",
        *(
            str(head)
            for head, ours, _ in rows
            if ours == "lm_head.weight" and section.tie_embeddings
        ),
        *(["*.position_ids"] if isinstance(section, VLMModelConfig) else []),
        # multi-token prediction
        *(f"{prefix}layers.{layer}.*" for layer in layers for prefix in ("model.", "")),
    ]


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


def files_in(folder: Path, patterns: Sequence[str]) -> dict[str, bytes]:
    """The files of a folder whose names match; ConfigError for one that is no such file by its size."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and any(fnmatchcase(path.name, pattern) for pattern in patterns):
            if path.stat().st_size > _MAX_BYTES:
                rule, fix = f"has more than {_MAX_BYTES} bytes", "remove it, or name another"
                raise invalid("", "size", ..., rule, fix, where=path, kind=ConfigError)
            found[path.name] = path.read_bytes()
    return found
