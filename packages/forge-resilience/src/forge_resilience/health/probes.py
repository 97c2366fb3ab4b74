"""Probes of a device and of a node, and `Finding`, what a probe reports.

A device: a product whose answer is known exactly, and memory that keeps what was written. A node: space and writing, shared
memory, loopback; with the others: clocks, and a folder that all see.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_resilience._shared.limits import limit_problem

if TYPE_CHECKING:
    import torch

OK = "ok"
WARN = "warn"
MISSING = "missing"
BROKEN = "broken"
_WORDS = 2**17  # words of 8 bytes in a MiB, as patterns are compared as int64
_CHUNK = 2**20  # words per comparison: bounds the memory of the probe
_PATTERNS = (0, -1, 0x5555555555555555, -0x5555555555555556)
DRAIN = "have the device looked at; until then leave its node out of the queue, or hide it (CUDA_VISIBLE_DEVICES=)"
_MOST_SECONDS_APART = 2.0
_MIN_FREE_SHM = 64 * 2**20
_SEEN_WITHIN_SECONDS = 10.0  # a folder of NFS shows what others wrote after some seconds
_DATA = b"forge" * 1000
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True)
class Finding:
    """Result of a probe: `state` is ok, warn (runs can go on), missing (something that is not here), or broken (runs
    cannot go on, or compute wrong).

    Usage: `if finding.state == BROKEN: print(finding)`.
    """

    what: str
    state: str
    value: str
    rule: str = ""
    fix: str = ""

    @property
    def detail(self) -> str:
        """The value, and the rule that it breaks."""
        return f"{self.value}; {self.rule}" if self.rule else self.value

    def __str__(self) -> str:
        return f"{self.what}: {self.detail}" + (f"; {self.fix}" if self.fix else "")

    def as_dict(self) -> dict[str, Any]:
        """Plain data, without empty fields."""
        return {name: value for name, value in asdict(self).items() if value}


# ---- a device


def known_answer(device: torch.device | str, seed: int = 0) -> Finding:
    """Multiply Hadamard matrices, with random signs and small factors, in fp32 and on an accelerator in bf16, too.

    The product of H D and D H^T is n times the identity: all terms and sums are integers that both dtypes hold
    exactly, so every element is known without computing it and one wrong bit shows. The right ones are counted: a
    device that computes nothing has none. Products of 2048 x 2048 (256 x 256 on a CPU), one host sync.
    """
    import torch

    device = torch.device(device)
    n = 256 if device.type == "cpu" else 2048

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

    name, total = _device_name(device), len(dtypes) * n * n
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
    if mib is None:  # several times the caches that would answer in place of the memory
        mib = 1 if device.type == "cpu" else 512
    if device.type == "cuda":
        mib = min(mib, torch.cuda.mem_get_info(device)[0] // 2**21)

    name = _device_name(device)
    try:  # all memory is taken first, so that no later error is for lack of it
        block = torch.empty(mib * _WORDS, dtype=torch.int64, device=device)
        addresses = torch.arange(_CHUNK, device=device)
        expected = torch.empty(_CHUNK, dtype=torch.int64, device=device)
        kept = torch.empty(_CHUNK, dtype=torch.bool, device=device)
    except torch.OutOfMemoryError:
        mib = 0
    if not mib:
        return Finding("device memory", OK, f"{name}: no free memory to try")

    right = torch.zeros((), dtype=torch.int64, device=device)
    chunks = block.split(_CHUNK)
    for pattern in _PATTERNS:
        block.fill_(pattern)
        for chunk in chunks:
            right += torch.eq(chunk, pattern, out=kept[: len(chunk)]).sum()

    for i, chunk in enumerate(chunks):
        chunk.copy_(torch.add(addresses, i * _CHUNK, out=expected)[: len(chunk)])
    for i, chunk in enumerate(chunks):
        same = torch.add(addresses, i * _CHUNK, out=expected)[: len(chunk)]
        right += torch.eq(chunk, same, out=kept[: len(chunk)]).sum()

    if count := (len(_PATTERNS) + 1) * len(block) - int(right):
        rule = "memory must keep what was written"
        value = f"{name}: {count} words of {mib} MiB came back changed"
        return Finding("device memory", BROKEN, value, rule, DRAIN)
    return Finding("device memory", OK, f"{name}: {mib} MiB keep five patterns")


def _device_name(device: Any) -> str:
    import torch

    if device.type != "cuda":
        return str(device.type)
    return f"{device} ({torch.cuda.get_device_name(device)})"


# ---- a node


def disk(folder: str | os.PathLike[str], min_free_bytes: int = 2**30) -> Finding:
    """Write into `folder`, read it back, and look at the space that is left."""
    what, folder = "disk", Path(folder)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(_DATA)
            file.seek(0)
            same = file.read() == _DATA
    except OSError as error:
        # no fault of the node, so only a warning
        full = error.errno in _FULL or limit_problem(error)
        value, rule = f"{folder}: {error.strerror}", "the folder must take files"
        fix = "free some space" if full else "make it writable"
        return Finding(what, WARN if full else BROKEN, value, rule, fix)

    if not same:
        value = f"{folder} gave back other bytes than were written"
        return Finding(what, BROKEN, value, "a disk must keep what is written", "look at the disk")

    free = shutil.disk_usage(folder).free
    value = f"{folder}: writable, {free / 2**30:.1f} GiB free"
    if free >= min_free_bytes:
        return Finding(what, OK, value)
    rule = f"{min_free_bytes / 2**30:.1f} GiB should be free"
    fix = "free some space: checkpoints need about 12 bytes per parameter"
    return Finding(what, WARN, value, rule, fix)


def shared_memory(folder: str = "/dev/shm") -> Finding:
    """Check /dev/shm, in which data workers and NCCL pass tensors: it must be writable and have some space."""
    what = "shared memory"
    if not os.path.isdir(folder):
        return Finding(what, WARN, f"there is no {folder}", "", "mount a tmpfs there")
    found = disk(folder, _MIN_FREE_SHM)
    if found.state == OK:
        return Finding(what, OK, found.value)
    fix = "give the container more of it (--shm-size=8g), or remove old files"
    return Finding(what, WARN, found.value, found.rule, fix)


def loopback(timeout_seconds: float = 5.0) -> Finding:
    """Send a message over 127.0.0.1, which local ranks and launchers use."""
    what = "loopback"
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(timeout_seconds)
            with socket.create_connection(server.getsockname(), timeout_seconds) as client:
                peer, _ = server.accept()
                with peer:
                    peer.sendall(b"forge")
                    same = client.recv(5, socket.MSG_WAITALL) == b"forge"
    except OSError as error:
        rule = "127.0.0.1 must take connections"
        state = WARN if limit_problem(error) else BROKEN
        return Finding(what, state, f"127.0.0.1: {error}", rule, "bring up the interface lo")

    if not same:
        return Finding(what, BROKEN, "127.0.0.1 lost a message", "", "bring up the interface lo")
    return Finding(what, OK, "127.0.0.1 answers")


def clocks(times: Sequence[float]) -> list[Finding]:
    """Compare the clock of each rank, read at the same moment, with the median of all (Unix seconds)."""
    middle = sorted(times)[(len(times) - 1) // 2]
    rule = f"clocks should agree within {_MOST_SECONDS_APART:g} s, or logs and leases mislead"
    found = []
    for ahead in (at - middle for at in times):
        value = f"{abs(ahead):.1f} s {'behind' if ahead < 0 else 'ahead of'} the others"
        bad = (WARN, value, rule, "start chrony or ntpd there")
        found.append(Finding("clock", *(bad if abs(ahead) > _MOST_SECONDS_APART else (OK, value))))
    return found


def write_token(folder: str | os.PathLike[str]) -> str:
    """Write a new file in `folder` that other nodes are to see; return its name. Raises OSError."""
    path = Path(folder) / f".forge-health-{secrets.token_hex(6)}"
    path.write_bytes(_DATA)
    return path.name


def sees_token(
    folder: str | os.PathLike[str], name: str, seconds: float = _SEEN_WITHIN_SECONDS
) -> bool:
    """Return whether this node sees the file of another node, at once or within `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            if (Path(folder) / name).read_bytes() == _DATA:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)  # until the cache that this node has of the folder expires


def shared_folder(folder: str, seen: Sequence[bool], nodes: Sequence[str]) -> list[Finding]:
    """Findings of all ranks about the file that the first rank wrote into `folder`.

    A node that does not is broken while another node besides the first does: it has lost the file system.
    Where no other does, the folder is on a local disk of the first node, and all others report it.
    """
    elsewhere = [saw for saw, node in zip(seen, nodes) if node != nodes[0]]
    local = bool(elsewhere) and not any(elsewhere)

    what, rule = "shared folder", "all nodes must see the folder of the run"
    fix = "mount its file system there, or leave the node out"
    if local:
        fix = "it seems to be on a local disk: choose one that all nodes share"
    good = Finding(what, OK, f"{folder} is the same as that of {nodes[0]}")
    bad = Finding(what, BROKEN, f"{folder} is not that of {nodes[0]}", rule, fix)
    return [good if saw else bad for saw in seen]
