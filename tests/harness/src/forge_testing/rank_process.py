"""What runs inside a rank: wait for a task, run it, answer."""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import gc
import importlib
import importlib.util
import io
import os
import pickle
import random
import signal
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from forge_testing import devices

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

RETURNED, RAISED = b"+", b"-"
# Not one that code under test may handle, send or wait for.
STACK_SIGNAL: int = getattr(signal, "SIGRTMIN", signal.SIGUSR2 - 7) + 7
_PR_SET_PDEATHSIG = 1


class Task(NamedTuple):
    """A function of some file, its pickled arguments, and the test that calls it, as pytest names it."""

    path: list[str]
    module: str
    file: str
    name: str
    args: bytes
    test: str


def rank_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """A mesh of this rank's world, made once per process: groups cost threads and sockets.

    Collective on the first use of a shape. Usage: `rank_mesh((2, 2), ("dp_replicate", "dp_shard"))`.
    """
    import torch.distributed as dist

    return _mesh(shape, names, dist.get_world_size())


@functools.cache
def _mesh(shape: tuple[int, ...], names: tuple[str, ...], world: int) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(devices.device().type, shape, mesh_dim_names=names)


def serve(
    link: Connection, rank: int, world: int, folder: Path, parent: int, device: str
) -> NoReturn:
    """Be rank `rank` until the link closes. Never returns: Python's shutdown under gloo's threads aborts."""
    _die_with(parent)
    _write_to(folder, rank)
    try:
        _join(rank, world, folder, device)
        link.send_bytes(RETURNED)
    except BaseException:
        link.send_bytes(RAISED + traceback.format_exc().encode())
    while True:
        try:
            task: Task = pickle.loads(link.recv_bytes())
        except EOFError:
            os._exit(0)
        link.send_bytes(_run(task))


def _die_with(parent: int) -> None:
    """SIGKILL when the zygote ends, where the kernel offers it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def _write_to(folder: Path, rank: int) -> None:
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    # left open: faulthandler keeps the descriptor alone
    stack = open(folder / f"rank-{rank}.stack", "w")  # noqa: SIM115
    faulthandler.register(STACK_SIGNAL, file=stack, all_threads=True)
    _KEEP.append(stack)


_KEEP: list[Any] = []


def _join(rank: int, world: int, folder: Path, kind: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)
    device = devices.take(kind, rank)
    on_cuda = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
        store=store,
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=10),
        device_id=device if on_cuda else None,
    )


def _run(task: Task) -> bytes:
    """The pickled result and whether the rank's device was used for it, or the traceback."""
    before = devices.allocations()
    try:
        sys.path[:] = task.path
        os.environ["PYTEST_CURRENT_TEST"] = task.test
        function = getattr(_load(task.module, task.file), task.name)
        _seed()
        result = function(*pickle.loads(task.args))
        used = devices.device().type == "cpu" or devices.allocations() > before
        answer = RETURNED + _pickled((result, used))
    except BaseException:  # also SystemExit: only the link's end ends a rank
        answer = RAISED + traceback.format_exc().encode()
    gc.collect()  # models are cycles; what one call leaves should not be in the next one's way
    sys.stdout.flush()
    sys.stderr.flush()
    return answer


def _pickled(result: Any) -> bytes:
    buffer = io.BytesIO()
    _ToHost(buffer).dump(result)
    return buffer.getvalue()


class _ToHost(pickle.Pickler):
    """Tensors on a CUDA device arrive on the CPU."""

    def reducer_override(self, found: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch and isinstance(found, torch.Tensor) and found.is_cuda:
            return found.detach().cpu().requires_grad_(found.requires_grad).__reduce_ex__(2)
        return NotImplemented


def _load(name: str, file: str) -> ModuleType:
    """The module `name` of `file`: the imported one, an importable one, or the file run under that name."""
    module = sys.modules.get(name)
    if module is not None and _is_file(getattr(module, "__file__", None), file):
        return module
    try:
        spec = importlib.util.find_spec(name) if module is None else None
    except (ImportError, ValueError):
        spec = None
    if spec is not None and _is_file(spec.origin, file):
        return importlib.import_module(name)

    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _is_file(found: str | None, file: str) -> bool:
    return found is not None and os.path.abspath(found) == file


def _seed() -> None:
    """Tests must not depend on which others ran before in this process."""
    import torch

    random.seed(0)
    torch.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
