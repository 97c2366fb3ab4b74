"""The case of a job: a folder with all that the reference reads. Its arrays come from the files of the job.

The configuration is the resolved one, with every key, and the tokens are whole documents, so that the reference needs
neither the defaults of Forge nor its tokenizers. The order of samples, their packing and all computation are its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.fuzz.files import TOKEN_FILES, sources_of, token_documents
from tests.fuzz.job import Job, layout_keys, readers_of

from forge_data import open_source, open_stream, open_training
from forge_train import load_job


def write_case(
    job: Job,
    path: Path,
    folder: Path,
    weights: Mapping[str, torch.Tensor],
    skipped: Sequence[Sequence[int]],
    double: bool = False,
) -> Path:
    """Write the case of the job at `path` into `folder`, which is returned.

    weights: the initial ones, and buffers. skipped: windows of sample indices that are left out, last excluded.
    """
    folder.mkdir(parents=True)
    layout = layout_keys(job.choice)
    resolved = load_job(path, layout)
    config = resolved.config
    (folder / "job.json").write_text(json.dumps(plain(config), indent=1))
    run = {
        "steps": config.train.steps,  # None: a length in tokens
        "readers": readers_of(layout),
        "skipped": [list(window) for window in skipped],
        "bad_steps": [job.sizes["bad"]] if job["bad step"] == "skipped" else [],
        "rollbacks": rolled_back_to(job),
        "dtype": "float64" if double else "float32",
    }
    (folder / "run.json").write_text(json.dumps(run))
    save_tensors(folder / "weights.npz", weights)
    for table, (kind, rows) in sources_of(job).items():
        name = table.removeprefix("data.").replace("eval.sets.", "eval/").replace(".", "/")
        if kind in TOKEN_FILES:
            documents = token_documents(job, table.rpartition(".")[2], kind, rows)
            _write_documents(folder / f"{name}.npz", documents)
        else:
            _write_source(job, folder, name, table, config)
    return folder


def rolled_back_to(job: Job) -> list[int]:
    """The step of the checkpoint that each rollback goes back to; each step has one."""
    if job["bad step"] in ("no", "skipped"):
        return []
    before = int(job["bad step"] == "rollback, batches before")
    return [max(0, job.sizes["bad"] - 1 - before)]


def plain(value: Any) -> Any:
    """A configuration as nested dictionaries, by the keys of the TOML text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {f.name.removesuffix("_"): plain(getattr(value, f.name)) for f in fields}
    if isinstance(value, Mapping):
        return {name: plain(own) for name, own in value.items()}
    return [plain(own) for own in value] if isinstance(value, list | tuple) else value


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Tensors by name in a `.npz`; those in bf16 as fp32, which numpy has."""
    arrays = {
        n: (t.float() if t.dtype == torch.bfloat16 else t).numpy() for n, t in tensors.items()
    }
    np.savez(path, **arrays)


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of `save_tensors`."""
    with np.load(path) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays}


def _write_documents(path: Path, documents: Sequence[np.ndarray], **more: np.ndarray) -> None:
    path.parent.mkdir(exist_ok=True)
    offsets = np.cumsum([0, *map(len, documents)])
    np.savez(path, tokens=np.concatenate(documents).astype(np.int64), offsets=offsets, **more)


def _write_source(job: Job, folder: Path, name: str, table: str, config: Any) -> None:
    """Conversations as Forge's template makes them tokens; or samples of a source that packs its own."""
    kind, _, own = table.rpartition(".")
    tables = {"data.sources": config.data.sources, "eval.sets": config.eval.sets}
    source = tables[kind][own] if kind in tables else config.data.validation
    if source.name == "chat":
        found = open_source(source).rendered
        offsets = [*np.asarray(found.tokens.documents), found.tokens.num_tokens]
        ids = np.asarray(found.tokens.read(0, found.tokens.num_tokens), np.int64)
        weights = np.asarray(found.weights, np.float32)
        _write_documents(
            folder / f"{name}.npz", np.split(ids, offsets[1:-1]), label_weights=weights
        )
        return
    path = folder / "rows" / f"{name.removeprefix('sources/').replace('/', '.')}.npz"
    path.parent.mkdir(exist_ok=True)
    sizes, ids = job.sizes, np.arange(config.eval.sequences)
    if kind == "data.sources":
        ids = np.arange((sizes["steps"] + 2) * max(sizes["global_batch"], sizes["later_batch"]))
        stream = open_training(config.data, config.data_seed)
        stream = dict(zip(config.data.sources, getattr(stream, "streams", [stream])))[own]
    else:
        stream = open_stream(source, config.data.seq_len, packing=config.data.packing)
    epoch: dict[str, Any] = {}
    with contextlib.suppress(TypeError):  # of a source that is read while training
        epoch["epoch"] = len(stream)
    np.savez(path, **epoch, **_arrays(stream.arrays(ids)))


def _arrays(found: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Arrays of a stream as it gives them; those of ragged ones with their offsets."""
    arrays: dict[str, np.ndarray] = {}
    for name, value in found.items():
        if hasattr(value, "row_offsets"):
            arrays[name] = np.asarray(value.values)
            arrays[f"{name}.offsets"] = np.asarray(value.row_offsets, np.int64)
        else:
            arrays[name] = np.asarray(value)
    return arrays
