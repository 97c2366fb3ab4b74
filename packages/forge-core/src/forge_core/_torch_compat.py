"""The torch symbols that differ between supported versions, each in one place."""

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])


def not_compiled(function: F) -> F:
    """`torch.compiler.disable`, applied at the first call after something loaded the compiler.

    The decorator itself imports the compiler (sympy, numpy, a second or more), which everybody who
    imports us would pay for.
    """
    disabled: list[Any] = []

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **options)
        if not disabled:
            made: Any = torch.compiler.disable(function)
            if not hasattr(made, "_torchdynamo_disable"):  # then the mark below does nothing
                raise AttributeError(
                    f"torch {torch.__version__} must mark what is not compiled by _torchdynamo_disable; "
                    "use torch>=2.11,<2.16"
                )
            disabled.append(made)
        return disabled[0](*args, **options)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # not traced into, 2.11 to 2.15
    if (
        torch.__version__ < "2.12"
    ):  # which looks at the mark in what it traces, not in a frame of its own
        frames: Any = torch._C._dynamo.eval_frame
        actions = frames._FrameAction
        never = frames._FrameExecStrategy(actions.SKIP, actions.DEFAULT)
        frames.set_code_exec_strategy(cast(Any, call).__code__, never)
    return cast(F, call)


def constant_when_compiled(function: F) -> F:
    """`torch.compiler.assume_constant_result`, without its import of the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # 2.11 to 2.15
    return function


@constant_when_compiled
def has_triton() -> bool:
    """Whether torch can compile kernels for the GPU that is there."""
    from torch.utils._triton import has_triton as found  # private, torch 2.2 to 2.15

    return bool(found())


def without_modes() -> AbstractContextManager[object]:
    """Leave out what sees each operator (selective recomputation): torch compiles nothing below such a mode."""
    from torch.utils._python_dispatch import _disable_current_modes  # private, 2.11 to 2.15

    return _disable_current_modes()


def takes_kernel(x: Tensor) -> bool:
    """Whether x is a plain CUDA tensor in 16 bits of eager code; a compiler fuses torch's operators itself."""
    plain = x.is_cuda and type(x) is Tensor and x.dtype in (torch.bfloat16, torch.float16)
    return plain and not torch.compiler.is_compiling() and has_triton()


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Make the device of x the current one, on which Triton launches. Tensors of the CPU are for its interpreter."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


@constant_when_compiled
def takes_narrow_values(
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    values: int,
    causal: bool,
    masked: bool,
    grad: bool,
) -> bool:
    """Whether torch's attention is best given values that are narrower than queries and keys, by torch's own checks.

    In its order of speed: cuDNN takes some pairs of widths (192 and 128 on sm_90 and newer), where it is allowed; flash
    attention only one width; the memory-efficient kernel any. On the CPU flash attention has one width, too.
    """
    if device.type != "cuda":
        return False
    cuda = torch.backends.cuda
    # not of the size of the call: the checks read widths, strides and dtypes
    wide, narrow = (
        torch.empty(n, dtype=dtype, device=device).expand(1, 1, 2, n) for n in (width, values)
    )
    mask = torch.ones(2, 2, dtype=torch.bool, device=device) if masked else None
    wide, narrow = (t.detach().requires_grad_(grad) for t in (wide, narrow))
    given = cuda.SDPAParams(wide, wide, narrow, mask, 0.0, causal, False)
    if cuda.can_use_cudnn_attention(given):
        return True
    if cuda.can_use_flash_attention(cuda.SDPAParams(wide, wide, wide, mask, 0.0, causal, False)):
        return False
    return bool(cuda.can_use_efficient_attention(given))


@constant_when_compiled
@cache
def _varlen_parameters() -> frozenset[str]:
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


@constant_when_compiled
def varlen_computes(window: int | None) -> bool:
    """Whether the installed `varlen_attn` has a window; that of torch 2.11 is causal at most."""
    return window is None or "window_size" in _varlen_parameters()


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    borders: Tensor,
    longest: int,
    scale: float | None = None,
    window: int | None = None,
    causal: bool = True,
) -> Tensor:
    """Attention inside each of several sequences laid end to end, causal or full; CUDA, 16-bit only.

    q (T, H, D), k and v (T, Hkv, D), borders (N + 1,) int32 on the device of q -> (T, H, D). Heads
    are repeated where the installed `varlen_attn` has no `enable_gqa` (torch 2.11).
    """
    from torch.nn.attention.varlen import varlen_attn

    named = _varlen_parameters()
    # torch 2.11 spells it `is_causal=True`, 2.13 `window_size=(tokens to the left, to the right)`
    left, right = -1 if window is None else window - 1, 0 if causal else -1
    arguments: dict[str, Any] = (
        {"window_size": (left, right)} if "window_size" in named else {"is_causal": causal}
    )
    if scale is not None:
        arguments["scale"] = scale
    if q.size(1) != k.size(1):
        if "enable_gqa" in named:
            arguments["enable_gqa"] = True
        else:
            k, v = (t.repeat_interleave(q.size(1) // t.size(1), dim=1) for t in (k, v))
    out = varlen_attn(q, k, v, borders, borders, longest, longest, **arguments)
    return cast(Tensor, out)
