"""Tensors of a Hugging Face folder under Forge's names, one at a time."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .name_maps import assemble, to_forge
from .name_rows import Row, check_rows
from .problems import Problem, ProblemError, problems_of
from .safetensors_folder import HFFolder, matches
from .safetensors_headers import read_json

_TOWER = "vision_tower."
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")


class HFTensors:
    """The tensors of a Hugging Face folder under Forge's names.

        for name, tensor in HFTensors("Qwen3-0.6B", QWEN3.rows): ...

    The whole map is tried on names, shapes and dtypes first: what it cannot hold is a ValueError before
    the first tensor is read. Memory of an iteration: one tensor of Forge and one of the parts that it is
    made of. ``ignore`` are fnmatch patterns of Hugging Face names that are left out, in an index without a tensor
    too; ``ignored`` lists those that were. ``rows`` is {name of Forge: number of rows} of tensors that get more rows than the
    files have: each is the mean of those, in fp32.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        maps: Sequence[Row],
        ignore: Sequence[str] = (),
        rows: Mapping[str, int] | None = None,
    ) -> None:
        self._folder, self._rows = HFFolder(path, ignore), check_rows(maps)
        found = self._folder.meta()
        self.ignored = [name for name in found if matches(name, ignore)]
        for name in self.ignored:
            del found[name]
        try:
            self.meta = dict(to_forge(maps, found.items()))
        except ValueError as error:
            raise _restated(error, self._folder.path) from error
        self._in_files = dict(self.meta)
        for name in self.meta.keys() & (rows or {}):
            one = self.meta[name]
            self.meta[name] = one.new_empty(rows[name], *one.shape[1:])  # type: ignore[index]

    def differences(self, state: Mapping[str, Tensor]) -> list[str]:
        """A sentence for each tensor that only one of the files and ``state`` has, or of another shape."""
        return [str(problem) for problem in self.problems(state)]

    def problems(self, state: Mapping[str, Tensor]) -> list[Problem]:
        """:meth:`differences` as problems, by name."""
        there, fix, found = self.meta, "build the model of these files", []
        for name in sorted(there.keys() | state.keys()):
            if name not in state:
                found.append(Problem(name, "file_only", ..., "is in the files only", fix))
            elif name not in there:
                found.append(Problem(name, "model_only", ..., "is in the model only", fix))
            elif (here := tuple(state[name].shape)) != (shape := tuple(there[name].shape)):
                rule = f"is its shape in the model, and {shape} in the files"
                found.append(Problem(name, "shape", here, rule, fix))
        return found

    def read(self, name: str) -> Tensor:
        """The tensor of Forge's ``name`` on the CPU, in the dtype of the file."""
        found = assemble(name, self._in_files[name], self._rows, self._folder.read)
        if found.shape == (wanted := self.meta[name].shape):
            return found
        mean = found.float().mean(0, keepdim=True).to(found.dtype)
        return torch.cat([found, mean.expand(wanted[0] - len(found), *wanted[1:])])

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self.read(name)) for name in self.meta)


def _restated(error: ValueError, where: Path) -> ProblemError:
    """The error with the folder, and escapes for what no log should get, which names from a disk may hold."""

    def shown(text: str) -> str:
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:300])

    found = [replace(p, key=shown(p.key), rule=shown(p.rule)) for p in problems_of(error)]
    return ProblemError(found, ": ".join(filter(None, (str(where), getattr(error, "where", "")))))


def rows_in(
    path: Path,
    hf: Mapping[str, Any],
    config: Any,
    rows: Sequence[Row],
    beside: Sequence[str],
    images: bool,
) -> tuple[list[Row], list[str]]:
    """The rows under the names that the files have, and patterns of tensors that are left out: those that transformers
    does not load either, which change no logits, and `beside`. `hf` is the folder's `config.json`; `images` is true for a
    model with an encoder."""
    extra, heads = hf.get("num_nextn_predict_layers"), names_of(rows, "lm_head.weight")
    count = extra if type(extra) is int and 0 < extra < 64 else 0
    first = config.num_layers
    ignored = [
        "*.rotary_emb.inv_freq",
        *(heads if config.tie_embeddings else ()),
        *(["*.position_ids"] if images else []),
        # multi-token prediction
        *(f"{p}layers.{i}.*" for i in range(first, first + count) for p in ("model.", "")),
        *beside,
    ]
    return named_as_in(HFFolder(path, ignored).entries, rows), ignored


def has_own_head(path: Path, rows: Sequence[Row]) -> bool:
    """Whether the files have a head that differs from the embedding. transformers 5 does not tie it then, whatever
    config.json says; 4 drops it."""
    (head,), (embedding,) = (names_of(rows, f"{n}.weight") for n in ("lm_head", "embedding"))
    try:
        source = HFFolder(path, optional=[head])
    except ValueError:  # an error where the weights are read; a plan needs none
        return False
    names = [n for n in (embedding, embedding.removeprefix("model.")) if n in source.entries]
    return head in source.entries and bool(names) and not source.same(head, names[0])


def names_of(rows: Sequence[Row], name: str) -> list[str]:
    """Their name of one of our tensors."""
    return [str(theirs) for theirs, ours, _ in rows if ours == name]


def named_as_in(names: Collection[str], rows: Sequence[Row]) -> list[Row]:
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


def read_processor(folder: Path) -> dict[str, Any]:
    """The table of the folder's image processor; empty without one."""
    path = next((p for name in _PROCESSORS if (p := folder / name).is_file()), None)
    table: dict[str, Any] = {} if path is None else read_json(path)
    found: dict[str, Any] = table.get("image_processor", table)
    return found
