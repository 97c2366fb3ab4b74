"""The kind of work of an operator or a kernel, by names: its own and those of the operators around it."""

from __future__ import annotations

import re
from collections.abc import Sequence

#: Kinds in the order in which they claim an instant when several run at once; what none claims is idle.
KINDS = ("gemm", "attention", "optimizer", "elementwise", "copy", "communication")

_COMMUNICATION = re.compile(r"^(c10d::|_c10d_functional::|gloo:|nccl:|nccl[A-Z]|ncclDev|mpi:|ucc:)")
_OPTIMIZER = re.compile(r"^(Optimizer\.step#|forge\.optimizer$)")
_ATTENTION = re.compile(
    r"^aten::(_?scaled_dot_product|_flash_attention|_efficient_attention|_cudnn_attention)"
    r"|ScaledDotProduct.*Backward|^flash_attn|^flex_attention"
)
_GEMM = re.compile(
    r"^aten::(mm|addmm|bmm|baddbmm|matmul|linear|addmv|mv|dot|einsum|_?grouped_mm|_scaled_mm|_scaled_grouped_mm"
    r"|convolution|_convolution|convolution_backward|mkldnn_.*|_int_mm)$"
)
_COPY = re.compile(
    r"^aten::(copy_|_to_copy|to|clone|contiguous|cat|_chunk_cat|split_with_sizes_copy|_foreach_copy_|pin_memory)$"
    r"|^fsdp::|^Mem(cpy|set) "
)
# Nodes of the autograd engine and calls of the profiler wrap operators and compute nothing themselves.
_OPERATOR = re.compile(r"^(?!autograd::|torch::autograd|profiler::|c10d::|cuda)\w+::")
# Of a compiled region the CPU shows no operators.
_COMPILED = re.compile(
    r"^(## Call CompiledFxGraph|CompiledFunction|Torch-Compiled Region|graph_\d+_cpp)"
)

_GEMM_KERNEL = re.compile(
    r"gemm|gemv|cutlass|nvjet|cublas|xmma|wgmma|matmul|grouped_mm|triton_tem_|triton_mm"
)
_ATTENTION_KERNEL = re.compile(r"flash|fmha|sdpa|attention|attn", re.IGNORECASE)
_OPTIMIZER_KERNEL = re.compile(r"adam|lion|muon|sgd|fusedoptimizer", re.IGNORECASE)
# Names of a fused kernel repeat those of its operators.
_FUSED = re.compile(r"^triton_(poi|red|per)_")


def kind_of_operators(names: Sequence[str]) -> str | None:
    """The kind of an operator of a CPU, or of a kernel that it launched; None for code that is no operator.

    `names` lead from the outermost operator or annotation to the innermost. A matrix product of the optimizer is the
    optimizer's, one of attention is attention's; communication is that wherever it stands.
    """
    for kind, pattern in (
        ("communication", _COMMUNICATION),
        ("optimizer", _OPTIMIZER),
        ("attention", _ATTENTION),
        ("gemm", _GEMM),
        ("copy", _COPY),
    ):
        if any(pattern.search(name) for name in names):
            inner = kind != "optimizer" or _computes(names)
            return kind if inner else None
    return "elementwise" if _computes(names) else None


def _computes(names: Sequence[str]) -> bool:
    return bool(names) and bool(_OPERATOR.search(names[-1]) or _COMPILED.search(names[-1]))


def kind_of_kernel(kernel: str, names: Sequence[str]) -> str:
    """The kind of a kernel or copy of a device, launched inside the operators `names`."""
    if kernel.startswith("nccl"):
        return "communication"
    if any(_OPTIMIZER.search(name) for name in names):
        return "optimizer"
    if kernel.startswith(("Memcpy ", "Memset ")):
        return "copy"
    found = kind_of_operators(names)
    if found not in (None, "elementwise", "communication") or _FUSED.search(kernel):
        return "elementwise" if found in (None, "communication") else found
    for kind, pattern in (
        ("attention", _ATTENTION_KERNEL),
        ("gemm", _GEMM_KERNEL),
        ("optimizer", _OPTIMIZER_KERNEL),
    ):
        if pattern.search(kernel):
            return kind
    return "elementwise"
