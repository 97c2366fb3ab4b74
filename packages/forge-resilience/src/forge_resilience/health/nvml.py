"""What the driver of an NVIDIA GPU has counted: memory errors, faults (XID), heat, throttling. Needs nvidia-ml-py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from forge_resilience.health.probes import BROKEN, OK, WARN, Finding

# Faults of the hardware; others, such as 13 and 31, are mostly a program's (NVIDIA, "XID Errors").
_HARDWARE_XIDS = {48, 62, 64, 74, 79, 94, 95, 119, 120}
_SLOWDOWNS = {0x08: "hardware slowdown", 0x20: "heat (software)", 0x40: "heat (hardware)", 0x80: "power brake"}  # fmt: skip
_MARGIN = 3  # degrees below the slowdown of the GPU, so that the warning comes before it
_DRAIN = "take the node out of the queue, and have the GPU looked at"


def driver_findings(driver: NvmlProbe | Finding | None) -> list[Finding]:
    """Return the findings of what `NvmlProbe.of` gave."""
    return driver.findings() if isinstance(driver, NvmlProbe) else [driver] if driver else []


class NvmlProbe:
    """Probe of one NVIDIA GPU's driver; its counters are compared with those at construction.

        probe = NvmlProbe.of(torch.device("cuda", 0))     # None for other devices
        for finding in probe.findings(): print(finding)

    `library` is `pynvml` (nvidia-ml-py). Values that a GPU does not support are left out. No sync, no device memory.
    """

    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle
        self._uncorrected = self._uncorrected_errors() or 0
        self._events: Any = None
        with contextlib.suppress(library.NVMLError):
            events = library.nvmlEventSetCreate()
            library.nvmlDeviceRegisterEvents(handle, library.nvmlEventTypeXidCriticalError, events)
            self._events = events

    @classmethod
    def of(cls, device: Any) -> NvmlProbe | Finding | None:
        """Make the probe of a CUDA device; a finding with the reason if it cannot be made, or None for other devices."""
        if device.type != "cuda":
            return None
        import torch

        try:
            import pynvml

            pynvml.nvmlInit()
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            return cls(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid))
        except ImportError:
            fix = "pip install 'forge-resilience[nvml]'"
            return Finding("driver", OK, "nvidia-ml-py is not installed: errors it has counted are not read", "", fix)  # fmt: skip
        except Exception as error:
            return Finding("driver", WARN, f"NVML does not answer: {error}", "", "look at the driver")  # fmt: skip

    def findings(self) -> list[Finding]:
        """One finding per thing looked at, ok ones included."""
        return [*self._memory_errors(), *self._remapped_rows(), *self._new_faults(), *self._heat()]

    def _ask(self, name: str, *args: Any) -> Any:
        """The value of a query; None where this GPU or driver does not support it."""
        try:
            return getattr(self._library, name)(self._handle, *args)
        except (AttributeError, self._library.NVMLError):
            return None

    def _uncorrected_errors(self) -> int | None:
        """Uncorrected memory errors since the driver was loaded; None if not counted."""
        library = self._library
        kind, since = library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, library.NVML_VOLATILE_ECC
        return self._ask("nvmlDeviceGetTotalEccErrors", kind, since)

    def _memory_errors(self) -> Iterator[Finding]:
        count = self._uncorrected_errors()
        if count is None:
            return
        new = count - self._uncorrected
        value = f"{count} uncorrected memory errors since the driver was loaded, {new} of them in this process"
        rule = "memory errors must be corrected"
        state = BROKEN if new > 0 else WARN if count else OK
        yield Finding("ECC", state, value, rule if count else "", _DRAIN if count else "")

    def _remapped_rows(self) -> Iterator[Finding]:
        rows = self._ask("nvmlDeviceGetRemappedRows")
        if rows is None:
            return
        corrected, uncorrected, pending, failed = rows
        value = f"{corrected + uncorrected} rows of memory are replaced"
        if failed:
            yield Finding("rows", BROKEN, f"{value}, and one could not be", "spare rows must be left", _DRAIN)  # fmt: skip
        elif pending:
            yield Finding("rows", WARN, f"{value} after the next reset", "", "reset the GPU when it is idle")  # fmt: skip
        else:
            yield Finding("rows", OK, value)

    def _new_faults(self) -> Iterator[Finding]:
        """A finding about XIDs since the last call."""
        seen: list[int] = []
        while self._events is not None:
            try:
                event = self._library.nvmlEventSetWait_v2(self._events, 0)
            except self._library.NVMLError:  # a timeout after 0 ms: no event is waiting
                break
            seen.append(int(event.eventData))
        if self._events is None:
            return

        bad = sorted(set(seen) & _HARDWARE_XIDS)
        numbers = ", ".join(map(str, sorted(set(seen))))
        value = f"XID {numbers}" if seen else "no XID since the start"
        rule = "the GPU must have no fault" if seen else ""
        state = BROKEN if bad else WARN if seen else OK
        yield Finding("faults", state, value, rule, _DRAIN if bad else "")

    def _heat(self) -> Iterator[Finding]:
        library = self._library
        now = self._ask("nvmlDeviceGetTemperature", library.NVML_TEMPERATURE_GPU)
        limit = self._ask("nvmlDeviceGetTemperatureThreshold", library.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)  # fmt: skip
        bits = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
        reasons = [reason for bit, reason in _SLOWDOWNS.items() if bits & bit]
        hot = now is not None and limit is not None and now > limit - _MARGIN
        value = "" if now is None else f"{now} C" + ("" if limit is None else f" of {limit} C")
        value += f", slowed down by {', '.join(reasons)}" if reasons else ""
        if not value:
            return
        rule = "a GPU that slows down slows down all" if reasons or hot else ""
        yield Finding("heat", WARN if rule else OK, value.lstrip(", "), rule, "look at its cooling and power" if rule else "")  # fmt: skip
