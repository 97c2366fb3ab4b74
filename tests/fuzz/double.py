"""Make this process compute in float64 where Forge computes in float32, so that a difference of rounding vanishes.

Forge has no such precision. Here its modules see `torch.float64` under the name `torch.float32`, and `Tensor.float()` gives
float64; nothing else changes, so layouts, data and order of operations are those of the job. A process stays so.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any

import torch

#: Packages that compute; data and files keep their types.
_PACKAGES = ("forge_core.", "forge_parallel.", "forge_moe.", "forge_vlm.", "forge_train.trainer.")
_DATA = "forge_vlm.data."
_FLOAT32 = torch.float32
_done: set[str] = set()


class _Torch(ModuleType):
    """The module torch with another float32."""

    float32 = torch.float64
    float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def compute_in_double() -> None:
    """Change the modules that are imported by now; call it again after further imports."""
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    proxy = _Torch("torch")
    for name, module in list(sys.modules.items()):
        if name in _done or not name.startswith(_PACKAGES) or name.startswith(_DATA):
            continue
        _done.add(name)
        values = vars(module)
        if values.get("torch") is torch:
            values["torch"] = proxy
        if "adamw" in values and name.endswith("optim.adamw"):
            values["adamw"] = _fused(values["adamw"])
        if values.get("grouped_mm") is not None:
            values["grouped_mm"] = _grouped_mm
        for value in list(values.values()):
            if getattr(value, "__module__", None) == name or isinstance(value, dict):
                _change(value)


def _fused(adamw: Any) -> Any:
    """torch's AdamW, whose fused kernel takes float32 counts of steps for parameters of any type."""

    def update(*args: Any, found_inf: Any = None, **keys: Any) -> None:
        *others, steps = args
        narrow = [step.to(_FLOAT32) for step in steps]
        keys["found_inf"] = None if found_inf is None else found_inf.to(_FLOAT32)
        adamw(*others, narrow, **keys)
        for step, own in zip(steps, narrow):
            step.copy_(own)

    return update


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
    """torch's grouped_mm, which has no float64: rows of `a` by the matrix of their group in `b` (E, K, N), or columns of
    `a` by the rows of `b`."""
    ends = offs.tolist()
    groups = list(zip([0, *ends], ends))
    if b.dim() == 2:
        return torch.stack([a[:, first:end] @ b[first:end] for first, end in groups])
    out = a.new_zeros(a.size(0), b.size(-1))
    for (first, end), matrix in zip(groups, b):
        out[first:end] = a[first:end] @ matrix
    return out


def _change(value: Any) -> None:
    """Change what was made from float32 at import: tables, class attributes, and defaults of functions."""
    if isinstance(value, dict):
        for key, own in value.items():
            if own is torch.float32:
                value[key] = torch.float64
    elif inspect.isclass(value):
        for key, own in list(vars(value).items()):
            if own is torch.float32:
                setattr(value, key, torch.float64)
            elif inspect.isfunction(own):
                _change(own)
    elif inspect.isfunction(value):
        value.__defaults__ = value.__defaults__ and tuple(map(_wide, value.__defaults__))
        if value.__kwdefaults__:
            value.__kwdefaults__ = {k: _wide(v) for k, v in value.__kwdefaults__.items()}


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
