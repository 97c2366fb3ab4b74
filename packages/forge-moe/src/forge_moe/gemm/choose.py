"""The backend of the grouped GEMM for a device, a dtype and a shape."""

import torch
from torch import Tensor

from forge_moe._shared.problems import Problem, invalid, raise_problems
from forge_moe._torch_compat import grouped_mm, is_compiling_or_fake
from forge_moe.gemm.backends import BATCHED, GROUPED_MM, LOOP, SHAPES_ONLY, GemmBackend
from forge_moe.gemm.custom_ops import CUSTOM_OPS
from forge_moe.gemm.float8 import EMULATED, SCALED

_FIX = "use backend = 'auto' or 'loop'"


def choose_backend(name: str, x: Tensor, widths: tuple[int, ...]) -> GemmBackend:
    """The backend for rows `x` and matrices of these widths.

    "auto" is `grouped_mm` where its kernel runs: bf16 (on CPUs also fp32 and fp16), widths a multiple of 16
    bytes, fp32 not under torch.compile. Elsewhere it is the loop, which on an accelerator costs one host
    sync per layer, and under torch.compile and torch.export, as a custom operator, one per product.
    "float8" is torch's scaled kernel on a GPU and an emulation elsewhere. A backend chosen by name is used or
    refused with ValueError, never replaced.
    """
    obstacle = _obstacle(x, widths)
    if name == "auto":
        name = "grouped_mm" if obstacle is None else "loop"
    elif name == "grouped_mm" and obstacle is not None and not x.is_meta:
        raise_problems("", [obstacle])
    if name != "grouped_mm" and is_compiling_or_fake(x) and not torch.compiler.is_compiling():
        return SHAPES_ONLY
    if name == "float8":
        return _float8(x, widths)
    loop = CUSTOM_OPS if torch.compiler.is_compiling() else LOOP
    return {"grouped_mm": GROUPED_MM, "loop": loop, "batched": BATCHED}[name]


def _obstacle(x: Tensor, widths: tuple[int, ...]) -> Problem | None:
    """The reason why the grouped kernel cannot multiply `x`, or None."""
    if grouped_mm is None:
        rule = "needs grouped_mm, which this torch lacks"
        return Problem("backend", "requires", "grouped_mm", rule, _FIX)
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        rule = f"supports bf16, fp16 and fp32, not {x.dtype}"
        return Problem("backend", "dtype", "grouped_mm", rule, _FIX)
    if x.dtype != torch.bfloat16 and (x.device.type != "cpu" or is_compiling_or_fake(x)):
        rule = f"supports only bf16 on {x.device.type} or under torch.compile, not {x.dtype}"
        return Problem("backend", "compile", "grouped_mm", rule, _FIX)
    step = 16 // x.element_size()
    if any(width % step for width in widths):
        rule = f"needs widths that are multiples of {step} in {x.dtype}, and they are {widths}"
        return Problem("backend", "widths", "grouped_mm", rule, _FIX)
    return None


def _float8(x: Tensor, widths: tuple[int, ...]) -> GemmBackend:
    if x.device.type != "cuda":
        return EMULATED
    if x.dtype != torch.bfloat16 or any(width % 16 for width in widths):
        rule = f"needs bf16 rows and widths that are multiples of 16, not {x.dtype} and {widths}"
        fix = "use precision bf16, or backend = 'auto'"
        raise invalid("backend", "precision", "float8", rule, fix)
    if torch.cuda.get_device_capability(x.device) < (9, 0):
        device = torch.cuda.get_device_name(x.device)
        rule = f"needs a GPU of capability 9.0 (H100) or later, and this is {device}"
        raise invalid("backend", "device", "float8", rule, "use backend = 'auto'")
    return SCALED
