"""Adapters that leave a run: added to the weights, or as a folder of peft."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from forge_ckpt import SavedTensors
from forge_ckpt.hf import Row, hf_name
from forge_core.lora import LoRAConfig, merged_weight


class MergedTensors:
    """The whole weights of a checkpoint with its adapters added, one tensor at a time, as `save_hf` reads them.

        with MergedTensors(step, base, config.scale) as tensors:
            save_hf("out", rows, tensors)

    Memory: one tensor and its adapter, in fp32. ValueError where the base is not the one that they were trained beside.
    """

    def __init__(self, checkpoint: Path, base: Path, scale: float) -> None:
        self._scale = scale
        self._checkpoint, self._base = SavedTensors(checkpoint), SavedTensors(base)
        if self._checkpoint.read_object("base")["digest"] != self._base.digest:
            raise ValueError(
                f"{base} is not the base that {checkpoint} was trained beside; restore it"
            )
        self.adapters = self._checkpoint.below("model")
        frozen = self._base.below("model")
        self.meta = frozen | {n: t for n, t in self.adapters.items() if not _is_factor(n)}
        self.meta |= {
            n: self.meta[n].float() for n in self.meta if self._adapter(n) in self.adapters
        }
        self._frozen = frozen.keys()

    @staticmethod
    def _adapter(weight: str) -> str:
        return f"{weight.removesuffix('.weight')}.lora_a"

    def read(self, name: str) -> Tensor:
        """A tensor, merged in fp32 where it has an adapter."""
        if name not in self._frozen:
            return self._checkpoint.read(f"model.{name}")
        weight, adapter = self._base.read(f"model.{name}"), self._adapter(name)
        if adapter not in self.adapters:
            return weight
        a, b = (self._factor(f"{adapter[:-1]}{letter}") for letter in "ab")
        return merged_weight(weight.float(), a, b, self._scale)

    def factors(self) -> dict[str, Tensor]:
        """The matrices of all adapters."""
        return {name: self._factor(name) for name in self.adapters if _is_factor(name)}

    def _factor(self, name: str) -> Tensor:
        return self._checkpoint.read(f"model.{name}")

    def __enter__(self) -> MergedTensors:
        return self

    def __exit__(self, *error: object) -> None:
        self._checkpoint.__exit__(None, None, None)
        self._base.__exit__(None, None, None)


def _is_factor(name: str) -> bool:
    return name.rpartition(".")[2] in ("lora_a", "lora_b")


def peft_files(
    tensors: MergedTensors, rows: Sequence[Row], config: LoRAConfig, base: str | None
) -> tuple[dict[str, bytes], list[Row]]:
    """(files, rows) of a folder that peft loads onto the base model: what is beside the matrices, and their names.

    `base` names that model, if anything is known of it. Raises ValueError for an adapter of a layer that the family
    does not have as it is here, such as one of three that are fused there.
    """
    layers = sorted(
        name.rpartition(".")[0] for name in tensors.adapters if name.endswith(".lora_a")
    )
    there = {layer: hf_name(rows, f"{layer}.weight") for layer in layers}
    fused = [layer for layer, name in there.items() if name is None]
    if fused:
        raise ValueError(
            f"--adapter: {', '.join(fused[:3])} must be a layer of the family, too, and is rearranged there; leave "
            "--adapter out to write the merged model"
        )
    targets = {layer: str(name).removesuffix(".weight") for layer, name in there.items()}
    settings: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "target_modules": sorted(targets.values()),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    names: list[Row] = [
        (f"base_model.model.{target}.lora_{letter.upper()}.weight", f"{layer}.lora_{letter}", ())
        for layer, target in targets.items()
        for letter in "ab"
    ]
    return {"adapter_config.json": text.encode()}, names
