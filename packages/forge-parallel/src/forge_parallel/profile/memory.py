"""Bytes of a rank by category: parameters, gradients, optimizer state, and the rest at a step's peak."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from forge_parallel.profile.breakdown import Event, step_windows

_DEVICE_TYPES = {"cpu": 0, "cuda": 1}  # c10::DeviceType in events of a trace


def memory_by_category(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: str | None = None
) -> dict[str, int]:
    """Bytes of `parameters`, `gradients` and `optimizer` that this rank holds: of a DTensor its own shard.

        memory_by_category(model, optimizer)["optimizer"]

    Exact sizes of tensors, a shared one once, without padding of an allocator. `device` "cuda" or "cpu" counts those
    there alone. Call it between backward and `zero_grad`, or there are no gradients. No communication, no sync.
    """
    parameters = list(model.parameters())
    groups: dict[str, Iterable[Any]] = {
        "parameters": parameters,
        "gradients": [p.grad for p in parameters if p.grad is not None],
        "optimizer": list(optimizer.state.values()),
    }
    return {name: _bytes(group, device) for name, group in groups.items()}


def gradient_addresses(model: nn.Module) -> set[int]:
    """Where this rank's gradients begin in memory."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return {t.untyped_storage().data_ptr() for t in _tensors(grads)}


def _bytes(values: Iterable[Any], device: str | None) -> int:
    own = {id(t): t for t in _tensors(values) if device in (None, t.device.type)}
    return sum(t.numel() * t.element_size() for t in own.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    """The plain tensors inside tensors of other classes and inside containers."""
    if isinstance(value, Tensor):
        inner = getattr(value, "__tensor_flatten__", None)  # a DTensor has one
        if inner is None:
            yield value
        else:
            for name in inner()[0]:
                yield from _tensors(getattr(value, name))
    elif isinstance(value, Mapping):
        for inside in value.values():
            yield from _tensors(inside)
    elif isinstance(value, (list, tuple)):
        for inside in value:
            yield from _tensors(inside)


def peak_of_trace(events: Sequence[Event], device: str, gradients: set[int]) -> dict[str, int]:
    """The most bytes that the last step of a trace with `profile_memory` held beyond those of its beginning.

    `step_peak` is that number, `step_peak_gradients` the part of it in allocations that begin at `gradients`, and
    `activations_and_other` the rest: activations, gathered parameters, temporary tensors. On CUDA `peak` is the peak
    with all that was allocated before. Sizes are those of the allocator.
    """
    windows, kind = step_windows(events), _DEVICE_TYPES[device]
    if not windows:
        return {}
    start, end = windows[-1]
    changes = sorted(
        (e["ts"], e["args"]["Bytes"], e["args"]["Addr"], e["args"]["Total Allocated"])
        for e in events
        if e.get("name") == "[memory]"
        and start <= e["ts"] <= end
        and e["args"]["Device Type"] == kind
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
