"""Kernels, matmuls and peak bytes of single places of training, on the null GPU: one line of JSON.

python -m tests.null_gpu.places norm        # in the environment of `device.environment()`
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
from tests.null_gpu.device import counted
from torch import nn

from forge_core.loss import fused_cross_entropy
from forge_core.model.attention_ops import AttentionSpec, attend_sequences
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


PLACES = (norm, norm_bf16, norm_fp32_weight, rotation, window, fused_loss, rounding)


def measure(make: Callable[[], Callable[[], None]]) -> dict[str, int]:
    """Of the second call: the first compiles. `peak` is above what was allocated before, in MB."""
    run = make()
    run()
    # else gradients are added to those of the first call
    for cell in getattr(run, "__closure__", None) or ():
        value = cell.cell_contents
        if isinstance(value, nn.Module):
            value.zero_grad()
        elif isinstance(value, torch.Tensor):
            value.grad = None

    torch.cuda.reset_peak_memory_stats()
    before, start = counted(), torch.cuda.memory_allocated()
    run()
    found = counted()
    found.subtract(before)
    kernels = found["launch"] + found["launch.triton"] + found["blas"]
    peak = (torch.cuda.max_memory_allocated() - start) // 10**6
    return {"kernels": kernels, "matmuls": found["blas"], "peak": peak}


if __name__ == "__main__":
    names = sys.argv[1:]
    print(json.dumps({p.__name__: measure(p) for p in PLACES if not names or p.__name__ in names}))
