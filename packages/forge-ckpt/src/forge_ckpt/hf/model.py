"""The model of a Hugging Face folder: configs of its parts, tensors under Forge's names, files that belong to it."""

import os
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from forge_ckpt._shared.paths import user_path
from forge_ckpt._shared.problems import invalid
from forge_ckpt.hf.families import find_family
from forge_ckpt.hf.folder import MAX_JSON, HFFolder, matches, read_json
from forge_ckpt.hf.load import HFTensors, load_hf
from forge_ckpt.hf.rows import Row
from forge_ckpt.hf.save import save_hf

#: Files next to the weights that belong to the model: configuration, license. Those of tokenizers the caller knows.
_KEPT = (
    *("config.json", "generation_config.json", "LICENSE*", "preprocessor_config.json"),
    *("processor_config.json", "video_preprocessor_config.json"),
)
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_BESIDE = "beside"
_TOWER = "vision_tower."
#: Tensors with a row for each token.
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
        self._main = next(iter(self.configs))  # the part with embedding and head
        self._sizes: dict[str, int] = {}
        self.untied = self.config.tie_embeddings and self._has_own_head()
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
        shutil.rmtree(folder / _BESIDE, ignore_errors=True)  # of a start that was killed
        source = HFFolder(
            self.path, optional=["*lm_head.weight"]
        )  # a tied head may be in the index only
        if names := [n for n in source.entries if matches(n, self.family.beside)]:
            save_hf(folder / _BESIDE, _same(names), {name: source.read(name) for name in names})

    def _rows(self) -> tuple[list[Row], list[str]]:
        """The rows under the names that the files have, and patterns of tensors that are left out."""
        rows = self.family.rows_of(self.configs)
        ignored = [*self._ignored(rows), *self.family.beside]
        return _named_as_in(HFFolder(self.path, ignored).entries, rows), ignored

    def _ignored(self, rows: Sequence[Row]) -> list[str]:
        """Patterns of tensors that transformers does not load either: they change no logits."""
        extra, heads = self.hf.get("num_nextn_predict_layers"), _names(rows, "lm_head.weight")
        count = extra if type(extra) is int and 0 < extra < 64 else 0
        first = self.config.num_layers
        return [
            "*.rotary_emb.inv_freq",
            *(heads if self.config.tie_embeddings else ()),
            *(["*.position_ids"] if self._main == "vision" else []),
            # multi-token prediction
            *(f"{p}layers.{i}.*" for i in range(first, first + count) for p in ("model.", "")),
        ]

    def _has_own_head(self) -> bool:
        """Whether the files have a head that differs from the embedding. transformers 5 does not tie it then, whatever
        config.json says; 4 drops it."""
        rows = self.family.rows_of(self.configs)
        (head,), (embedding,) = (
            _names(rows, f"{name}.weight") for name in ("lm_head", "embedding")
        )
        try:
            source = HFFolder(self.path, optional=[head])
        except ValueError:  # an error where the weights are read; a plan needs none
            return False
        names = [n for n in (embedding, embedding.removeprefix("model.")) if n in source.entries]
        return head in source.entries and bool(names) and not source.same(head, names[0])


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


def read_processor(folder: Path) -> dict[str, Any]:
    """The table of the folder's image processor; empty without one."""
    path = next((p for name in _PROCESSORS if (p := folder / name).is_file()), None)
    table: dict[str, Any] = {} if path is None else read_json(path)
    found: dict[str, Any] = table.get("image_processor", table)
    return found


def merged_config(original: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """A `config.json`: `written` over the original, and so its tables of parts (text_config) of the same model_type.

    The token that fills up rows stays: it is the tokenizer's.
    """
    found = {**original, **written}
    for key, value in written.items():
        before = original.get(key)
        if not isinstance(value, dict) or not isinstance(before, dict):
            continue
        if "model_type" in value and before.get("model_type") == value["model_type"]:
            found[key] = {**before, **value}
    if "pad_token_id" in original:
        found["pad_token_id"] = original["pad_token_id"]
    return found


def _names(rows: Sequence[Row], name: str) -> list[str]:
    """Their name of one of our tensors."""
    return [str(theirs) for theirs, ours, _ in rows if ours == name]


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
