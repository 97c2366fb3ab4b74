"""Numbers of the device on their way to the host, while the device goes on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class HostCopy:
    """A copy of device values that starts at once and is read later.

        copy = HostCopy([loss, norm])
        ...                               # the next step is queued
        loss, norm = copy.read()

    A plain read waits for everything that the device has been given by then; this one for what came before
    the copy. On an accelerator one copy into pinned memory and one event; elsewhere a copy.
    """

    def __init__(self, numbers: Sequence[Tensor]) -> None:
        values = torch.cat([n.detach().double().flatten() for n in numbers])
        self._event: torch.Event | None = None
        if values.is_cpu:
            self._host = values
            return
        self._host = torch.empty_like(values, device="cpu", pin_memory=True)
        self._host.copy_(values, non_blocking=True)
        self._event = torch.Event(values.device)
        self._event.record()

    def read(self) -> list[float]:
        """The numbers, flat, in the order given."""
        if self._event is not None:
            self._event.synchronize()
        read: list[float] = self._host.tolist()
        return read
