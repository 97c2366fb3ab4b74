"""The model of a Hugging Face folder: configs of its parts, tensors under Forge's names, files that belong to it."""

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from forge_ckpt._shared.hf_tensors import HFTensors, has_own_head, rows_in
from forge_ckpt._shared.name_rows import Row
from forge_ckpt._shared.paths import user_path
from forge_ckpt._shared.problems import invalid
from forge_ckpt._shared.safetensors_folder import HFFolder, matches
from forge_ckpt._shared.safetensors_headers import MAX_JSON, read_json
from forge_ckpt.hf.families import find_family
from forge_ckpt.hf.load import load_hf
from forge_ckpt.hf.save import save_hf

#: Files next to the weights that belong to the model: configuration, license. Those of tokenizers the caller knows.
_KEPT = (
    *("config.json", "generation_config.json", "LICENSE*", "preprocessor_config.json"),
    *("processor_config.json", "video_preprocessor_config.json"),
)
_BESIDE = "beside"
#: Tensors with a row for each token, so `add_rows` changes their size.
_OF_TOKENS = ("embedding.weight", "lm_head.weight", "lm_head.bias")


class HFModel:
    """The model of a folder, as `config.json` describes it and the maps of the installed packages read it.

        model = HFModel("Qwen3-0.6B")
        model.configs["decoder"]                       # TransformerConfig
        model.load(Transformer(model.configs["decoder"]))

    `untied`: config.json ties a head that the files have with other values, which the config here does not tie, as
    transformers 5. Raises ValueError with a problem for each key
    that cannot be held.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = user_path(path)
        self.hf = read_json(self.path / "config.json")
        self.family = find_family(self.hf)
        self.configs = self.family.configs_from_hf(self.hf)
        # The part with embedding and head, as families list it first.
        self._main = next(iter(self.configs))
        self._sizes: dict[str, int] = {}
        self.untied = self.config.tie_embeddings and has_own_head(
            self.path, self.family.rows_of(self.configs)
        )
        if self.untied:
            self._set(tie_embeddings=False)

    @property
    def config(self) -> Any:
        """The config of the part with embedding and head."""
        return self.configs[self._main]

    def _set(self, **options: Any) -> None:
        self.configs[self._main] = replace(self.config, **options)

    def add_rows(self, vocab_size: int) -> None:
        """Give embedding and head rows for tokens that the tokenizer has and the model has not: each is the mean of its own.

        ValueError for fewer than there are, and for an embedding with rows that no token of text has.
        """
        key, least = "vocab_size", self.config.vocab_size
        if vocab_size < least:
            rule = f"must be at least {least}, the rows that {self.path} has"
            fix = "leave it out, or use that of the tokenizer"
            raise invalid(key, "range", vocab_size, rule, fix)
        if getattr(self.config, "input_only_ids", 0):
            ids = "whose ids after the vocabulary are those of images"
            rule = f"cannot be set for {self.family.name}, {ids}"
            fix = "prepare the data with the model's tokenizer"
            raise invalid(key, "unsupported", vocab_size, rule, fix)
        self._set(vocab_size=vocab_size)
        self._sizes = dict.fromkeys(_OF_TOKENS, vocab_size)

    def tensors(self) -> HFTensors:
        """The weights under Forge's names; ValueError for what the family's maps cannot hold."""
        return HFTensors(self.path, *self._rows(), self._sizes)

    def load(self, model: nn.Module) -> None:
        """Fill a model of these configs in place; ValueError for tensors that do not fit."""
        rows, ignored = self._rows()
        load_hf(self.path, rows, model, ignore=ignored)

    def files(self, more: Sequence[str] = ()) -> dict[str, bytes]:
        """The files that belong to the model, and those that match `more`, by name; ValueError for a file over 256 MiB."""
        return read_files(self.path, (*_KEPT, *more))

    def keep_beside(self, folder: Path) -> None:
        """Copy the tensors that are no part of the model, for `tensors_beside`. Memory: all of them."""
        # A killed start may have left it incomplete.
        shutil.rmtree(folder / _BESIDE, ignore_errors=True)
        source = HFFolder(
            self.path, optional=["*lm_head.weight"]
        )  # a tied head may be in the index only
        if names := [n for n in source.entries if matches(n, self.family.beside)]:
            save_hf(folder / _BESIDE, _same(names), {name: source.read(name) for name in names})

    def _rows(self) -> tuple[list[Row], list[str]]:
        """The rows under the names that the files have, and patterns of tensors that are left out."""
        rows = self.family.rows_of(self.configs)
        images = self._main == "vision"
        return rows_in(self.path, self.hf, self.config, rows, self.family.beside, images)


def notes_of(model: HFModel, ignored: Sequence[str]) -> list[str]:
    """Lines about what is not taken as it stands in the folder; `ignored` are names of its tensors."""
    untied = "tie_word_embeddings is true and lm_head.weight differs from the embedding: not tied, as in transformers 5"
    names = ", ".join(ignored[:3]) + ", ..." * (len(ignored) > 3)
    left_out = f"left out, as the model does not use them: {names} ({len(ignored)})"
    return [untied] * model.untied + [left_out] * bool(ignored)


def tensors_beside(folder: Path) -> HFTensors | None:
    """The tensors that `keep_beside` copied there, for `save_hf(..., extra=...)`; None where there was nothing."""
    path = folder / _BESIDE
    return HFTensors(path, _same(HFFolder(path).entries)) if path.is_dir() else None


def _same(names: Iterable[str]) -> list[Row]:
    """The map in which each tensor keeps its name."""
    return [(name, name, ()) for name in names]


def read_files(folder: Path, patterns: Sequence[str]) -> dict[str, bytes]:
    """The files of a folder whose names match, by name; ValueError for one over 256 MiB."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and matches(path.name, patterns):
            if path.stat().st_size > MAX_JSON:
                rule, fix = f"has more than {MAX_JSON} bytes", "remove it, or name another"
                raise invalid("", "size", ..., rule, fix, where=path)
            found[path.name] = path.read_bytes()
    return found
