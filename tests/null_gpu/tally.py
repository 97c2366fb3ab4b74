"""Kernels, bytes, matmul FLOPs and collectives of a region, by class of operator, and the FSDP units that are gathered.

Kernels of a plain run come from `counted()`; a Tally sees each operator and adds some of its own, so it is for bytes and FLOPs.
Bytes are those of the distinct input and output tensors of operators that launch a kernel; a gather reads what it writes.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.null_gpu.device import counted
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Class of an operator: the first pattern that its name matches.
CLASSES = {
    "attention": r"attention|flash|varlen",
    "matmul": r"aten\.(mm|addmm|bmm|baddbmm|_grouped_mm|_scaled_mm|_scaled_grouped_mm)\.",
    "loss": r"linear_cross_entropy|softmax|nll|logsumexp",
    "norm": r"rms_norm|layer_norm",
    "fsdp copies": r"fsdp\.|split_with_sizes_copy|chunk_cat",
    "collective": r"c10d",
    "optimizer": r"fused_adam|_foreach",
    "cast, copy": r"_to_copy|copy_|clone|cat\.|stack",
    "gather, sort": r"index|embedding|gather|scatter|sort|cumsum|searchsorted|bincount|topk|histc",
    "fill": r"zero|fill|full|ones|arange|empty",
    "elementwise": r"",
}
_READ_WHAT_THEY_WRITE = re.compile(r"index_select|embedding\.|gather\.|index\.Tensor")
_OVERWRITE = re.compile(r"zero_|fill_|copy_|normal_|uniform_")


def launched(counts: Counter[str]) -> int:
    """Kernels among the counts of the device: launches by name, of Triton and of cuBLAS."""
    return counts["launch"] + counts["launch.triton"] + counts["blas"]


class Tally(TorchDispatchMode):
    """Sums over the operators of a region.

        with Tally() as tally:
            step()
        tally.matmul_flops, tally.bytes()

    matmuls, matmul_flops: of mm, addmm, bmm, baddbmm and _grouped_mm; attention is not among them. largest: (bytes,
    operator, shape) of the largest output. collective_bytes: by name, the larger of input and output. calls: of all operators,
    by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.read: Counter[str] = Counter()
        self.written: Counter[str] = Counter()
        self.collective_bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.matmuls = self.matmul_flops = 0
        self.largest: tuple[int, str, tuple[int, ...]] = (0, "", ())

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        before = launched(counted())
        out = func(*args, **kwargs)
        self._add(func, args, kwargs, out, launched(counted()) - before)
        return out

    def _add(self, func: Any, args: Any, kwargs: Any, out: Any, kernels: int) -> None:
        name = str(func)
        self.calls[name] += 1
        kind = next(kind for kind, pattern in CLASSES.items() if re.search(pattern, name))
        inputs, outputs = tensors((args, kwargs)), tensors(out)
        if kind == "collective":
            self.collective_bytes[name] += max(map(size, inputs + outputs), default=0)
        if kind == "matmul":
            self.matmuls += 1
            self.matmul_flops += matmul_flops(name, args)
        if not kernels:
            return

        self.kernels[kind] += kernels
        changed = tensors(list(mutated(func, args, kwargs)))
        written = changed or outputs
        overwrites = bool(changed) and (_OVERWRITE.search(name) is not None)
        ids = {id(t) for t in changed} if overwrites else set()
        read = sum(size(t) for t in {id(t): t for t in inputs}.values() if id(t) not in ids)
        writes = sum(map(size, written))
        if _READ_WHAT_THEY_WRITE.search(name):
            read = min(read, writes + sum(map(size, inputs[1:])))
        self.read[kind] += read
        self.written[kind] += writes
        for tensor in outputs:
            if size(tensor) > self.largest[0]:
                self.largest = size(tensor), name, tuple(tensor.shape)

    def bytes(self) -> int:
        """Bytes that all kernels read and write."""
        return sum(self.read.values()) + sum(self.written.values())


def tensors(tree: Any) -> list[Tensor]:
    """The tensors of nested arguments; of a DTensor its shard."""
    found = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return [getattr(tensor, "_local_tensor", tensor) for tensor in found]


def size(tensor: Tensor) -> int:
    """Bytes of a tensor, or of its storage where an expanded one is larger."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def mutated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Arguments that an operator writes to."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield kwargs.get(argument.name, args[place] if place < len(args) else None)


def matmul_flops(name: str, args: tuple[Any, ...]) -> int:
    """FLOPs of a product. A grouped one multiplies each row of its left matrix once, whatever the sizes of groups."""
    operands = [a for a in args if isinstance(a, Tensor)]
    left, right = operands[1:3] if "add" in name else operands[:2]
    if "grouped" in name:
        inner = left.shape[-1]
        rows = math.prod(left.shape[:-1])
        return 2 * rows * inner * right.shape[-1]
    return 2 * math.prod(left.shape) * right.shape[-1]


class Units:
    """FSDP units of a model: bytes of each, how often each is gathered, and the most bytes that are gathered at a time."""

    def __init__(self, model: nn.Module) -> None:
        self.bytes: dict[str, int] = {}
        self.gathered: Counter[str] = Counter()
        self.most_bytes = self.most_units = 0
        self._alive: set[str] = set()
        self._names: dict[int, str] = {}
        for name, module in model.named_modules():
            state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None  # type: ignore[operator]
            for group in _groups(state):
                self._names[id(group)] = name or "root"
                sizes = [(math.prod(p._orig_size), p.param_dtype or p.orig_dtype) for p in group.fsdp_params]  # fmt: skip
                self.bytes[name or "root"] = sum(n * dtype.itemsize for n, dtype in sizes)

    @contextmanager
    def watched(self) -> Iterator[Units]:
        """Count within; the methods of torch are replaced meanwhile."""
        unshard, reshard = FSDPParamGroup.unshard, FSDPParamGroup._to_sharded

        def up(group: Any, *args: Any, **kwargs: Any) -> Any:
            name = self._names.get(id(group))
            skipped = group._training_state == TrainingState.PRE_BACKWARD and not group.unshard_in_backward  # fmt: skip
            if name and not skipped and not group.is_unsharded and name not in self._alive:
                self._alive.add(name)
                self.gathered[name] += 1
                self.most_bytes = max(self.most_bytes, sum(self.bytes[n] for n in self._alive))
                self.most_units = max(self.most_units, len(self._alive))
            return unshard(group, *args, **kwargs)

        def down(group: Any, *args: Any, **kwargs: Any) -> Any:
            self._alive.discard(self._names.get(id(group), ""))
            return reshard(group, *args, **kwargs)

        FSDPParamGroup.unshard, FSDPParamGroup._to_sharded = up, down  # type: ignore[method-assign]
        try:
            yield self
        finally:
            FSDPParamGroup.unshard, FSDPParamGroup._to_sharded = unshard, reshard  # type: ignore[method-assign]

    def gathered_bytes(self) -> int:
        return sum(self.bytes[name] * times for name, times in self.gathered.items())


def _groups(state: Any) -> list[Any]:
    if state is None:
        return []
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]
