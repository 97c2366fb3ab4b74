"""Numbers of the device that the host reads later, while the device goes on."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["HostCopy"]


class HostCopy:
    """A copy of device values that starts at once and is read later.

        copy = HostCopy({"loss": loss, "norm": norm})
        ...                                       # the next step is queued
        (loss,), (norm,) = copy.read().values()

    A plain read waits for all work that was queued on the device by then; `read` waits only for work queued before
    the copy. On an accelerator it is one copy into pinned memory and one event, elsewhere a copy. Values of
    all tensors travel as one fp64 tensor, so they must be on one device.
    """

    def __init__(self, numbers: Mapping[str, Tensor]) -> None:
        self._sizes = {name: tensor.numel() for name, tensor in numbers.items()}
        values = torch.cat([tensor.detach().double().flatten() for tensor in numbers.values()])
        self._event: torch.Event | None = None
        if values.is_cpu:
            self._host = values
            return
        self._host = torch.empty_like(values, device="cpu", pin_memory=True)
        self._host.copy_(values, non_blocking=True)
        self._event = torch.Event(values.device)
        self._event.record()

    def read(self) -> dict[str, list[float]]:
        """The numbers of each tensor, flat, by its name."""
        if self._event is not None:
            self._event.synchronize()
        parts = self._host.split(list(self._sizes.values()))
        return {name: part.tolist() for name, part in zip(self._sizes, parts, strict=True)}
