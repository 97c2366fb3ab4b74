"""Probes of a device: a product whose answer is known exactly, and memory that keeps what was written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forge_resilience.health.finding import BROKEN, OK, Finding

if TYPE_CHECKING:
    import torch

_SIZE = {"cpu": 256}
_ACCELERATOR_SIZE = 2048
_MIB = {"cpu": 1}
_ACCELERATOR_MIB = 512  # several times the caches that would answer in place of the memory
_WORDS = 2**17  # of 8 bytes in a MiB
_PART = 2**20  # words that are compared at once
_PATTERNS = (0, -1, 0x5555555555555555, -0x5555555555555556)
DRAIN = "have the device looked at; until then leave its node out of the queue, or hide it (CUDA_VISIBLE_DEVICES=)"


def known_answer(device: torch.device | str, seed: int = 0) -> Finding:
    """Multiply Hadamard matrices, with random signs and small factors, in fp32 and on an accelerator in bf16, too.

    The product of H D and D H^T is n times the identity: all terms and sums are integers that both dtypes hold
    exactly, so every element is known without computing it and one wrong bit shows. The right ones are counted: a
    device that computes nothing has none. Products of 2048 x 2048 (256 x 256 on a CPU), one host sync.
    """
    import torch

    device = torch.device(device)
    n = _SIZE.get(device.type, _ACCELERATOR_SIZE)
    generator = torch.Generator().manual_seed(seed)
    left = _hadamard(n)[torch.randperm(n, generator=generator)]
    signs = torch.randint(0, 2, (n,), generator=generator) * 2.0 - 1
    factors = torch.randint(1, 4, (n,), generator=generator).float()
    expected = torch.diag(n * factors * factors.flip(0)).to(device)
    a = (factors[:, None] * left * signs).to(device)
    b = (signs[:, None] * left.T * factors.flip(0)).to(device)
    right = torch.zeros((), dtype=torch.int64, device=device)
    dtypes = [torch.float32] if device.type == "cpu" else [torch.float32, torch.bfloat16]
    for dtype in dtypes:
        right += (torch.matmul(a.to(dtype), b.to(dtype)) == expected.to(dtype)).sum()
    name, total = _name(device), len(dtypes) * n * n
    if count := total - int(right):
        rule = "a product of integers must be exact"
        value = f"{name}: {count} of {total} elements of a known product are wrong"
        return Finding("computing", BROKEN, value, rule, DRAIN)
    return Finding("computing", OK, f"{name}: a known product is exact")


def _hadamard(n: int) -> torch.Tensor:
    """Sylvester's matrix of +1 and -1, for a power of two."""
    import torch

    h = torch.ones(1, 1)
    while len(h) < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h


def memory_patterns(device: torch.device | str, mib: int | None = None) -> Finding:
    """Write four patterns and the addresses into `mib` MiB of free memory and read them back; one host sync.

    Words that came back are counted, as in `known_answer`.

    By default 512 MiB of an accelerator and 1 of a CPU, and at most half of what is free; where nothing is, as in the
    middle of a run, nothing is tried.
    """
    import torch

    device = torch.device(device)
    mib = _MIB.get(device.type, _ACCELERATOR_MIB) if mib is None else mib
    if device.type == "cuda":
        mib = min(mib, torch.cuda.mem_get_info(device)[0] // 2**21)
    name = _name(device)
    try:  # all that is needed is taken before it is tried
        block = torch.empty(mib * _WORDS, dtype=torch.int64, device=device)
        addresses = torch.arange(_PART, device=device)
        expected = torch.empty(_PART, dtype=torch.int64, device=device)
        kept = torch.empty(_PART, dtype=torch.bool, device=device)
    except torch.OutOfMemoryError:
        mib = 0
    if not mib:
        return Finding("device memory", OK, f"{name}: no free memory to try")
    right = torch.zeros((), dtype=torch.int64, device=device)
    parts = block.split(_PART)
    for pattern in _PATTERNS:
        block.fill_(pattern)
        for part in parts:
            right += torch.eq(part, pattern, out=kept[: len(part)]).sum()
    for i, part in enumerate(parts):
        part.copy_(torch.add(addresses, i * _PART, out=expected)[: len(part)])
    for i, part in enumerate(parts):
        same = torch.add(addresses, i * _PART, out=expected)[: len(part)]
        right += torch.eq(part, same, out=kept[: len(part)]).sum()
    if count := (len(_PATTERNS) + 1) * len(block) - int(right):
        rule = "memory must keep what was written"
        value = f"{name}: {count} words of {mib} MiB came back changed"
        return Finding("device memory", BROKEN, value, rule, DRAIN)
    return Finding("device memory", OK, f"{name}: {mib} MiB keep five patterns")


def _name(device: Any) -> str:
    import torch

    if device.type != "cuda":
        return str(device.type)
    return f"{device} ({torch.cuda.get_device_name(device)})"
