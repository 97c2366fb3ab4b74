"""Weights of a Hugging Face folder as a checkpoint, tensor by tensor."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from forge_ckpt import objects
from forge_ckpt._shared.hf_tensors import HFTensors
from forge_ckpt._shared.paths import user_path
from forge_ckpt.manifest import ObjectEntry
from forge_ckpt.write.stream import Box, write_checkpoint


def store_hf(
    store: str | os.PathLike[str],
    step: int,
    source: HFTensors,
    *,
    dtype: torch.dtype | None = torch.float32,
    about: Mapping[str, Any] | None = None,
) -> Path:
    """Commit the tensors of ``source`` below ``model`` as ``step`` of a store; returns its directory.

        store_hf("runs/a/checkpoints", 0, HFTensors("Qwen3-0.6B", QWEN3.rows))

    ``dtype`` casts floating-point tensors (None: as in the files); ``about`` are further objects by name.
    The model is never held: memory is one tensor, its cast, and the blocks of the writer. Raises StepExists
    if the store has the step or a newer one.
    """

    def boxes() -> Iterator[Box]:
        for name in source.meta:
            tensor = source.read(name)
            if dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(dtype)
            yield Box.whole(("model", name), tensor)
            del tensor  # or it would live while the next one is read

    found = {
        name: ObjectEntry((name,), objects.encode(value, name))
        for name, value in (about or {}).items()
    }
    return write_checkpoint(user_path(store), step, [boxes()], found)
