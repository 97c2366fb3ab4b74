"""Where a process waits for its device: {"module:function": times}, written as JSON at its end.

torch warns of every operation that waits (its synchronization debug mode: `.item()`, a copy to pageable memory,
`nonzero`), but not of waits by name (`torch.cuda.synchronize`, `Event.synchronize`, `barrier`), which are wrapped here. A wait
belongs to the innermost function outside torch and the standard library. Lines are left out, so that a kept
table changes only when waits do.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

# "" is the module of code that the compiler generated.
_NOT_OURS = (sys.stdlib_module_names - {"__main__"}) | {"", "torch", "torchao", "triton", "null_gpu_shim", "null_gpu_objects", "null_gpu_waits"}  # fmt: skip
_RESUMED = re.compile(
    r"torch_dynamo_resume_in_(.+)_at_\d+"
)  # dynamo's function after a graph break

_seen: Counter[str] = Counter()


def record(folder: str) -> None:
    """Count waits from now on; the process writes them into the folder when it ends, if it used a device."""
    on_wait(lambda: _seen.update([_place()]))
    leave = os._exit

    def write_and_leave(status: int) -> None:
        _write(Path(folder))
        leave(status)

    os._exit = write_and_leave  # type: ignore[assignment]
    atexit.register(_write, Path(folder))


def on_wait(call: Callable[[], object]) -> None:
    """Call `call()` at each wait of this process from now on, in the thread that waits; the device was not used before."""
    import torch

    torch.cuda._lazy_call(lambda: torch._C._cuda_set_sync_debug_mode(1))  # 1: warn
    torch._C._set_warnAlways(True)  # else each place warns once
    _watch_warnings(call)
    torch.Event = type("Event", (torch.Event,), {})  # type: ignore[misc]  # a built-in type takes no other method
    for owner in (torch.cuda, torch.accelerator, torch.cuda.Event, torch.Event):
        _watch_calls(owner, call)
    if torch.distributed.is_available():
        _watch_barriers(torch.distributed, call)


def _watch_warnings(call: Callable[[], object]) -> None:
    """Warnings of waits are seen before programs, logging or tests take warnings, whatever these filter."""
    show = warnings._showwarnmsg  # type: ignore[attr-defined]
    put = warnings.filterwarnings

    def call_or_show(message: Any) -> None:
        text = str(message.message)
        if "called a synchronizing CUDA operation" in text:
            call()
        elif "Synchronization debug mode" not in text:
            show(message)

    def be_first() -> None:
        for text in ("called a synchronizing CUDA operation", "Synchronization debug mode"):
            put("always", message=f".*{text}")

    def then_be_first(change: Callable[..., None]) -> Callable[..., None]:
        def changed(*given: Any, **named: Any) -> None:
            change(*given, **named)
            be_first()

        return changed

    be_first()
    warnings._showwarnmsg = call_or_show  # type: ignore[attr-defined]
    for name in ("filterwarnings", "simplefilter", "resetwarnings"):
        setattr(warnings, name, then_be_first(getattr(warnings, name)))


def _watch_calls(owner: Any, call: Callable[[], object]) -> None:
    wait = owner.synchronize

    def synchronize(*given: Any, **named: Any) -> Any:
        call()
        return wait(*given, **named)

    owner.synchronize = synchronize


def _watch_barriers(dist: Any, call: Callable[[], object]) -> None:
    """A barrier of NCCL waits in C++ that no warning of Python comes from."""
    barrier = dist.barrier

    def watched(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        if not async_op and "nccl" in dist.get_backend(group):
            call()
        return barrier(group, async_op, device_ids)

    dist.barrier = watched


def stack() -> Iterator[FrameType]:
    """Frames from the inside; behind those of a thread of autograd, those of the main thread, which waits for it."""
    frame: FrameType | None = sys._getframe(1)
    names = set()
    while frame is not None:
        yield frame
        names.add(frame.f_code.co_qualname)
        frame = frame.f_back
    main = threading.main_thread()
    if threading.current_thread() is not main and "Thread._bootstrap" not in names:
        frame = sys._current_frames().get(main.ident or 0)
        while frame is not None:
            yield frame
            frame = frame.f_back


def _place() -> str:
    frames = list(stack())
    ours = (frame for frame in frames if _module(frame).partition(".")[0] not in _NOT_OURS)
    frame = next(ours, frames[-1])
    name = _RESUMED.sub(r"\1", frame.f_code.co_name)
    whole = frame.f_code.co_qualname if name == frame.f_code.co_name else name
    return f"{_module(frame)}:{whole.replace('<locals>.', '')}"


def _module(frame: FrameType) -> str:
    name = frame.f_globals.get("__name__", "")
    spec = frame.f_globals.get("__spec__")
    return spec.name if name == "__main__" and spec else name


def _write(folder: Path) -> None:
    import torch

    if not torch.cuda.is_initialized():  # nor is it in the child of a fork
        return
    path = folder / f"rank-{os.environ.get('RANK', '0')}.{os.getpid()}.json"
    written = path.with_suffix(".part")  # the process may be killed meanwhile
    written.write_text(json.dumps(dict(sorted(_seen.items())), indent=2) + "\n")
    written.replace(path)
