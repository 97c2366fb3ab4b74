"""Kind of work of an operator or a kernel, by its name and the names of the operators around it."""

from __future__ import annotations

import re
from collections.abc import Sequence

#: Kinds in the order in which they claim an instant when several run at once; the remaining time is idle.
KINDS = ("gemm", "attention", "optimizer", "elementwise", "copy", "communication")

# Operators of each kind, by name. A name counts for the first kind that matches.
_OPERATORS = {
    "communication": re.compile(
        r"^(c10d::|_c10d_functional::|gloo:|nccl:|nccl[A-Z]|ncclDev|mpi:|ucc:)"
    ),
    "optimizer": re.compile(r"^(Optimizer\.step#|forge\.optimizer$)"),
    "attention": re.compile(
        r"^aten::(_?scaled_dot_product|_flash_attention|_efficient_attention|_cudnn_attention)"
        r"|ScaledDotProduct.*Backward|^flash_attn|^flex_attention"
    ),
    "gemm": re.compile(
        r"^aten::(mm|addmm|bmm|baddbmm|matmul|linear|addmv|mv|dot|einsum|_?grouped_mm|_scaled_mm|_scaled_grouped_mm"
        r"|convolution|_convolution|convolution_backward|mkldnn_.*|_int_mm)$"
    ),
    "copy": re.compile(
        r"^aten::(copy_|_to_copy|to|clone|contiguous|cat|_chunk_cat|split_with_sizes_copy|_foreach_copy_|pin_memory)$"
        r"|^fsdp::|^Mem(cpy|set) "
    ),
}
# Nodes of the autograd engine and calls of the profiler wrap operators and compute nothing themselves.
_OPERATOR = re.compile(r"^(?!autograd::|torch::autograd|profiler::|c10d::|cuda)\w+::")
# Fused kernels of a compiled region, which have no operators of their own on a CPU.
_COMPILED = re.compile(r"^## Call CompiledFxGraph")

_KERNELS = {
    "attention": re.compile(r"flash|fmha|sdpa|attention|attn", re.IGNORECASE),
    "gemm": re.compile(
        r"gemm|gemv|cutlass|nvjet|cublas|xmma|wgmma|matmul|grouped_mm|triton_tem_|triton_mm"
    ),
    "optimizer": re.compile(r"adam|lion|muon|sgd|fusedoptimizer", re.IGNORECASE),
}
# Names of a fused kernel repeat those of its operators.
_FUSED = re.compile(r"^triton_(poi|red|per)_")


def kind_of_operators(names: Sequence[str]) -> str | None:
    """Return the kind of a CPU operator, or of a kernel that it launched; None for code outside of operators.

    `names` lead from the outermost operator or annotation to the innermost. A matmul of the optimizer counts as
    optimizer, a matmul of attention as attention; communication counts as communication anywhere.
    """
    computes = bool(names) and any(p.search(names[-1]) for p in (_OPERATOR, _COMPILED))
    for kind, pattern in _OPERATORS.items():
        if any(pattern.search(name) for name in names):
            # Python code of an optimizer's step is not its work
            return kind if computes or kind != "optimizer" else None
    return "elementwise" if computes else None


def kind_of_kernel(kernel: str, names: Sequence[str]) -> str:
    """Return the kind of a device's kernel or copy, launched inside the operators `names`."""
    if kernel.startswith("nccl"):
        return "communication"
    if any(_OPERATORS["optimizer"].search(name) for name in names):
        return "optimizer"
    if kernel.startswith(("Memcpy ", "Memset ")):
        return "copy"
    found = kind_of_operators(names)
    if found not in (None, "elementwise", "communication") or _FUSED.search(kernel):
        return "elementwise" if found in (None, "communication") else found
    matching = (kind for kind, pattern in _KERNELS.items() if pattern.search(kernel))
    return next(matching, "elementwise")
