"""Bytes of a rank by category: parameters, gradients, optimizer state, and the rest at a step's peak."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from forge_parallel.profile.breakdown import Event, step_windows

_DEVICE_TYPES = {"cpu": 0, "cuda": 1}  # c10::DeviceType in events of a trace


def memory_by_category(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: str | None = None
) -> dict[str, int]:
    """Return bytes of `parameters`, `gradients` and `optimizer` on this rank; of a DTensor its own shard.

        memory_by_category(model, optimizer)["optimizer"]

    Counts exact sizes of tensors, a shared tensor once, without the allocator's padding; with `device` "cuda" or "cpu"
    only tensors there. Call it between backward and `zero_grad`, or there are no gradients. No communication, no sync.
    """
    parameters = list(model.parameters())
    groups: dict[str, Iterable[Any]] = {
        "parameters": parameters,
        "gradients": [p.grad for p in parameters if p.grad is not None],
        "optimizer": list(optimizer.state.values()),
    }
    return {name: _bytes(group, device) for name, group in groups.items()}


def gradient_addresses(model: nn.Module) -> set[int]:
    """Return the start addresses of this rank's gradients."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return {t.untyped_storage().data_ptr() for t in _tensors(grads)}


def _bytes(values: Iterable[Any], device: str | None) -> int:
    own = {id(t): t for t in _tensors(values) if device in (None, t.device.type)}
    return sum(t.numel() * t.element_size() for t in own.values())


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the plain tensors inside containers and tensor subclasses."""
    for tensor in tree_iter(values):
        flatten = getattr(tensor, "__tensor_flatten__", None)  # a DTensor has one
        if flatten is not None:
            yield from _tensors([getattr(tensor, name) for name in flatten()[0]])
        elif isinstance(tensor, Tensor):
            yield tensor


def peak_of_trace(events: Sequence[Event], device: str, gradients: set[int]) -> dict[str, int]:
    """Return the peak of the last step in a trace with `profile_memory`, in bytes beyond those at the step's start.

    `step_peak` is the peak, `step_peak_gradients` its part in allocations that begin at `gradients`, and
    `activations_and_other` the rest: activations, gathered parameters, temporary tensors. On CUDA `peak` also counts
    memory allocated before. Sizes are the allocator's.
    """
    windows = step_windows(events)
    if not windows:
        return {}
    start, end = windows[-1]
    changes = sorted(
        (e["ts"], e["args"]["Bytes"], e["args"]["Addr"], e["args"]["Total Allocated"])
        for e in events
        if e.get("name") == "[memory]"
        and start <= e["ts"] <= end
        and e["args"]["Device Type"] == _DEVICE_TYPES[device]
    )
    made = {address: ts for ts, size, address, _ in changes if size > 0 and address in gradients}

    held = most = grads = most_grads = total = 0
    for ts, size, address, allocated in changes:
        held += size
        if size > 0 and made.get(address) == ts:
            grads += size
        total = max(total, allocated)
        if held > most:
            most, most_grads = held, grads

    found = {
        "activations_and_other": most - most_grads,
        "step_peak_gradients": most_grads,
        "step_peak": most,
    }
    return found | ({"peak": total} if device == "cuda" else {})
