"""Kernels, matmuls, largest tensor and peak bytes of single places of training, on the null GPU: one line of JSON.

python -m tests.null_gpu.places norm        # in the environment of `device.environment()`
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tests.null_gpu.device import counted
from tests.null_gpu.tally import Tally
from torch import nn

from forge_core._torch_compat import takes_narrow_values
from forge_core.loss import fused_cross_entropy
from forge_core.model.attention_ops import (
    AttentionSpec,
    SegmentPlan,
    attend_documents,
    attend_sequences,
)
from forge_core.model.norm import PlusOneRMSNorm, RMSNorm
from forge_core.model.rope import rotate
from forge_core.optim import OptimizerConfig, build_optimizer

BF16 = torch.bfloat16


def made(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(*shape, device="cuda", dtype=dtype, requires_grad=dtype.is_floating_point)


def norm() -> Callable[[], None]:
    """Gemma's, of 4,096 tokens of width 2,560, with weights in fp32."""
    x, layer = made(1, 4096, 2560), PlusOneRMSNorm(2560).cuda()
    return lambda: layer(x).backward(torch.empty_like(x))


def norm_bf16() -> Callable[[], None]:
    x, layer = made(1, 4096, 2560), PlusOneRMSNorm(2560).to("cuda", BF16)
    return lambda: layer(x).backward(torch.empty_like(x))


def norm_fp32_weight() -> Callable[[], None]:
    x, layer = made(1, 4096, 2560), RMSNorm(2560).cuda()
    return lambda: layer(x).backward(torch.empty_like(x))


def rotation() -> Callable[[], None]:
    """Queries of Llama 3, of 4,096 tokens."""
    q, angles = made(1, 4096, 32, 128), torch.zeros(1, 4096, 1, 64, device="cuda")
    return lambda: rotate(q, (angles, angles)).backward(torch.empty_like(q))


def window() -> Callable[[], None]:
    """Mistral's attention of one row of 8,192 tokens: 32 heads over 8, window 4,096."""
    q, k, v = (made(1, 8192, heads, 128) for heads in (32, 8, 8))
    spec = AttentionSpec(window=4096)
    return lambda: attend_sequences(q, k, v, spec).backward(torch.empty_like(q))


def _gpt_oss(**spec: Any) -> Callable[[], None]:
    """Attention of gpt-oss, one row of 8,192 tokens: 64 heads of 64 over 8."""
    q, k, v = (made(1, 8192, heads, 64) for heads in (64, 8, 8))
    sinks, chosen = made(64, dtype=torch.float32), AttentionSpec(sinks=True, **spec)
    return lambda: attend_sequences(q, k, v, chosen, sinks).backward(torch.empty_like(q))


def sinks() -> Callable[[], None]:
    return _gpt_oss()


def sinks_window() -> Callable[[], None]:
    return _gpt_oss(window=128)


def sinks_packed() -> Callable[[], None]:
    """8 documents."""
    q, k, v = (made(1, 8192, heads, 64) for heads in (64, 8, 8))
    sinks, spec = made(64, dtype=torch.float32), AttentionSpec(sinks=True)
    plan = SegmentPlan.of_lengths([[1024] * 8])
    return lambda: attend_documents(q, k, v, plan, spec, sinks).backward(torch.empty_like(q))


def softcap() -> Callable[[], None]:
    """Gemma 2's, one row of 8,192 tokens in 8 documents: 8 heads of 256 over 4, by FlexAttention."""
    q, k, v = (made(1, 8192, heads, 256) for heads in (8, 4, 4))
    spec, plan = AttentionSpec(softcap=50.0, window=4096), SegmentPlan.of_lengths([[1024] * 8])
    return lambda: attend_documents(q, k, v, plan, spec).backward(torch.empty_like(q))


def _mla(dtype: torch.dtype = BF16) -> Callable[[], None]:
    """Latent attention's kernel, one row of 4,096 tokens: 16 heads, queries and keys of 192, values of 128."""
    q, k, v = (made(1, 4096, 16, width, dtype=dtype) for width in (192, 192, 128))
    return lambda: attend_sequences(q, k, v).backward(torch.empty_like(v))


def mla() -> Callable[[], None]:
    """cuDNN is off here, so that values are padded for flash attention."""
    return _mla()


def mla_fp32() -> Callable[[], None]:
    return _mla(torch.float32)


def fused_loss() -> Callable[[], None]:
    """Llama 3's head, of 16,384 tokens."""
    x, weight = made(16384, 4096), made(128256, 4096)
    labels = made(16384, dtype=torch.int64)
    return lambda: fused_cross_entropy(x, weight, labels).sum.backward()


def rounding() -> Callable[[], None]:
    """A step of AdamW of 100 matrices in bf16, with moments in bf16."""
    layers = nn.ModuleList(nn.Linear(512, 256, bias=False) for _ in range(100)).to("cuda", BF16)
    model = nn.ModuleDict({"layers": layers})
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = build_optimizer(model, OptimizerConfig(state_dtype="bf16"))
    return optimizer.step


PLACES = (
    norm,
    norm_bf16,
    norm_fp32_weight,
    rotation,
    window,
    sinks,
    sinks_window,
    sinks_packed,
    softcap,
    mla,
    mla_fp32,
    fused_loss,
    rounding,
)
KINDS = ("math", "flash", "efficient", "cudnn")


def choices() -> dict[str, dict[str, Any]]:
    """Kernels that torch's own checks choose on sm_90, by shape, with cuDNN allowed and under deterministic algorithms;
    and whether latent attention pads its values."""
    shapes = {
        "llama": (BF16, 32, 8, 128, 128, True),
        "gemma": (BF16, 8, 4, 256, 256, True),
        "latent": (BF16, 16, 16, 192, 128, True),
        "latent, padded": (BF16, 16, 16, 192, 192, True),
        "not causal": (BF16, 16, 16, 64, 64, False),
        "fp32": (torch.float32, 16, 16, 128, 128, True),
    }
    torch.backends.cuda.enable_cudnn_sdp(True)
    found: dict[str, dict[str, Any]] = {}
    for way in ("allowed", "deterministic"):
        torch.use_deterministic_algorithms(way == "deterministic")
        found[way] = {}
        for name, (dtype, heads, kv_heads, width, values, causal) in shapes.items():
            q, k, v = (
                made(1, 128, n, d, dtype=dtype).transpose(1, 2)
                for n, d in ((heads, width), (kv_heads, width), (kv_heads, values))
            )
            kind = torch._fused_sdp_choice(q, k, v, is_causal=causal, enable_gqa=heads != kv_heads)
            found[way][name] = KINDS[kind] if kind < len(KINDS) else kind
        narrow = [takes_narrow_values(q.device, d, 192, 128, True, False, True) for d in (BF16, torch.float32)]  # fmt: skip
        found[way]["narrow values in bf16 and fp32"] = narrow
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    return found


def measure(make: Callable[[], Callable[[], None]]) -> dict[str, int]:
    """Of the second call: the first compiles. `peak` is above what was allocated before, in MB; `largest` is the largest
    output of an operator of a third call, in MB: counting adds operators of its own."""
    run = make()
    run()
    forget = partial(_forget_gradients, run)
    forget()
    torch.cuda.reset_peak_memory_stats()
    before, start = counted(), torch.cuda.memory_allocated()
    run()
    found = counted()
    found.subtract(before)
    kernels = found["launch"] + found["launch.triton"] + found["blas"]
    peak = (torch.cuda.max_memory_allocated() - start) // 10**6
    forget()
    with Tally() as tally:
        run()
    largest = tally.largest[0] // 10**6
    return {"kernels": kernels, "matmuls": found["blas"], "peak": peak, "largest": largest}


def _forget_gradients(run: Callable[[], None]) -> None:
    # else gradients are added to those of the first call
    for cell in getattr(run, "__closure__", None) or ():
        value = cell.cell_contents
        if isinstance(value, nn.Module):
            value.zero_grad()
        elif isinstance(value, torch.Tensor):
            value.grad = None


if __name__ == "__main__":
    names = sys.argv[1:]
    rows = {p.__name__: measure(p) for p in PLACES if not names or p.__name__ in names}
    print(json.dumps({"places": rows, "choices": choices()}))
