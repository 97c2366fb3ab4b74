"""Low-rank adapters of a checkpoint for Hugging Face: added to the weights, or as a folder of peft."""

import contextlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from forge_ckpt._shared.name_rows import Row, hf_name
from forge_ckpt._shared.problems import invalid
from forge_ckpt.read.tensors import SavedTensors

#: Names of an adapter's matrices in its layer: A (R, I) and B (O, R) of rank R, in the order of PEFT's letters A and B.
FACTORS = ("lora_a", "lora_b")
#: A model in the cache of the hub: its name with -- for /, and the commit, because the path is of this host only.
_SNAPSHOT = re.compile(r".*/models--([^/]+)/snapshots/([0-9a-f]{40})/?")


class MergedTensors:
    """The full weights of a checkpoint with its adapters added, one tensor at a time, as `save_hf` reads them.

        with MergedTensors(step, base, config.alpha / config.rank) as tensors:
            save_hf("out", rows, tensors)

    A layer has `lora_a` (R, I) and `lora_b` (O, R) next to its weight (O, I), which becomes weight + scale * B A.
    Memory: one tensor and its adapter, in fp32. ValueError where the base is not the one that they were trained with.
    """

    def __init__(self, checkpoint: Path, base: Path, scale: float) -> None:
        self._scale = scale
        self._opened = contextlib.ExitStack()
        try:
            self._checkpoint = self._opened.enter_context(SavedTensors(checkpoint))
            self._base = self._opened.enter_context(SavedTensors(base))
            if self._checkpoint.read_object("base")["digest"] != self._base.digest:
                rule = f"must be the base that {checkpoint} was trained with"
                raise invalid("", "base", str(base), rule, "restore it")
        except BaseException:
            self._opened.close()
            raise

        saved, self._frozen = self._checkpoint.below("model"), self._base.below("model")
        self._factors = [name for name in saved if name.rpartition(".")[2] in FACTORS]
        self.layers = [n.rpartition(".")[0] for n in self._factors if n.endswith(f".{FACTORS[0]}")]
        merged = {name for layer in self.layers if (name := f"{layer}.weight") in self._frozen}
        rest = {name: saved[name] for name in saved.keys() - set(self._factors)}
        self.meta = {n: t.float() if n in merged else t for n, t in self._frozen.items()} | rest
        self._merged = merged

    def read(self, name: str) -> Tensor:
        """A tensor, merged in fp32 where it has an adapter."""
        if name not in self._frozen:
            return self._factor(name)
        weight = self._base.read(f"model.{name}")
        if name not in self._merged:
            return weight
        layer = name.removesuffix(".weight")
        a, b = (self._factor(f"{layer}.{factor}") for factor in FACTORS)
        return weight.float() + self._scale * (b.float() @ a.float())

    def factors(self) -> dict[str, Tensor]:
        """The matrices of all adapters."""
        return {name: self._factor(name) for name in self._factors}

    def _factor(self, name: str) -> Tensor:
        return self._checkpoint.read(f"model.{name}")

    def __enter__(self) -> "MergedTensors":
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()


def peft_files(
    tensors: MergedTensors,
    rows: Sequence[Row],
    rank: int,
    alpha: float,
    base: str | None,
    module: Callable[[str], str],
) -> tuple[dict[str, bytes], list[Row]]:
    """(files, rows) of a folder that peft loads onto the base model: files next to the matrices, and names of the matrices.

    base: the folder of that model, if it is known; one in the hub's cache becomes a name and a revision.
    module: the name in the model of a tensor of the family's files.

    Raises ValueError for a layer whose weight is a slice of another tensor in the family.
    """
    there = {layer: hf_name(rows, f"{layer}.weight") for layer in sorted(tensors.layers)}
    fused = [layer for layer, name in there.items() if name is None]
    if fused:
        rule = "have no weight of their own in the family: they are parts of fused tensors"
        raise invalid("", "fused", fused[:3], rule, "write the merged model")

    targets = {layer: module(str(name)).removesuffix(".weight") for layer, name in there.items()}
    cached = _SNAPSHOT.fullmatch(base or "")
    settings: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": cached[1].replace("--", "/") if cached else base,
        "revision": cached[2] if cached else None,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(targets.values()),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }

    text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    names: list[Row] = [
        (f"base_model.model.{target}.lora_{letter}.weight", f"{layer}.{factor}", ())
        for layer, target in targets.items()
        for letter, factor in zip("AB", FACTORS)
    ]
    return {"adapter_config.json": text.encode()}, names
