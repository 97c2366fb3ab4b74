"""Where a process waits for its device: {"module:function": times}, written as JSON at its end.

torch warns of every operation that waits (its synchronization debug mode: `.item()`, a copy to pageable memory,
`nonzero`), but not of waits by name (`torch.cuda.synchronize`, `Event.synchronize`), which are wrapped here. A wait
belongs to the innermost function outside torch and the standard library. Lines are left out, so that a kept
table changes only when waits do.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import sys
import warnings
from collections import Counter
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
    import torch

    torch.cuda._lazy_call(lambda: torch._C._cuda_set_sync_debug_mode(1))  # 1: warn
    torch._C._set_warnAlways(True)
    _count_warnings()
    for owner in (torch.cuda, torch.cuda.Event):
        _count_calls(owner)
    leave = os._exit

    def write_and_leave(status: int) -> None:
        _write(Path(folder))
        leave(status)

    os._exit = write_and_leave  # type: ignore[assignment]
    atexit.register(_write, Path(folder))


def _count_warnings() -> None:
    show = warnings.showwarning

    def count_or_show(message: Any, *rest: Any, **named: Any) -> None:
        if "called a synchronizing CUDA operation" in str(message):
            _seen[_place(sys._getframe(1))] += 1
        elif "Synchronization debug mode" not in str(message):
            show(message, *rest, **named)

    warnings.showwarning = count_or_show
    for text in ("called a synchronizing CUDA operation", "Synchronization debug mode"):
        warnings.filterwarnings("always", message=f".*{text}")


def _count_calls(owner: Any) -> None:
    wait = owner.synchronize

    def synchronize(*given: Any, **named: Any) -> Any:
        _seen[_place(sys._getframe(1))] += 1
        return wait(*given, **named)

    owner.synchronize = synchronize


def _place(frame: FrameType | None) -> str:
    innermost = frame
    while frame and _module(frame).partition(".")[0] in _NOT_OURS:
        frame = frame.f_back
    frame = frame or innermost
    assert frame is not None
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
