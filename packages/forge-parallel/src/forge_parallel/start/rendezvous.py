"""The rendezvous before a process group: all ranks check in at a store and compare their setup."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from forge_parallel._shared.problems import Problem, invalid
from forge_parallel.start.store import (
    ANSWER_SECONDS,
    StartError,
    agent_hosts,
    open_store,
    run_with_timeout,
)
from forge_parallel.start.world import RUN_NAME, World

_GRACE_SECONDS = 10.0  # rank 0 names missing ranks this long before the others give up
_LEAVE_SECONDS = 5.0
_SILENT = Problem("store", "silent", ..., "stopped answering", "is rank 0's process stopped?")
_DESCRIPTION = {"host", "pid", "network", "device", "gpu", "facts", "store_host"}
_DECISION = {"problems", "rank_0", "world_size"}
_attempts: Counter[str] = Counter()  # every rank starts its groups in the same order


def rendezvous(
    world: World, device: torch.device, seconds: float, facts: Mapping[str, str]
) -> tuple[Store, str | None]:
    """Wait until all ranks have checked in and compare their descriptions. Raises StartError on all present ranks.

    Returns a store for this process group alone, and the address at which other hosts reach rank 0: None if all
    ranks are on one host. Messages are JSON.
    """
    if world.world_size == 1:
        return HashStore(), None
    try:
        tcp_store = open_store(world, seconds)
        _attempts[world.where] += 1
        store = PrefixStore(_prefix(world), tcp_store)
        description = {**_description(world, device, facts), "store_host": tcp_store.host}
        verdict = run_with_timeout(
            seconds + 2 * _GRACE_SECONDS,
            lambda: _check_in(world, store, description, seconds),
            _SILENT,
        )
    except StartError:
        raise
    except RuntimeError as error:
        rule = f"went away ({str(error).splitlines()[0]}), as rank 0 or its launcher ended"
        raise invalid("store", "lost", ..., rule, kind=StartError) from error
    if verdict["problems"]:
        raise StartError([Problem(**one) for one in verdict["problems"]], shared=True)
    return store, verdict["rank_0"]


def _prefix(world: World) -> str:
    """The key prefix of this run and this start: equal on its ranks, and different for other jobs in the store.

    Process groups start one after the other; torchrun's store also holds keys of those before a restart.
    """
    environ = os.environ
    names = {
        "torchrun": ("TORCHELASTIC_RUN_ID",),
        "slurm": ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    }.get(world.launcher, (RUN_NAME,))
    run = ".".join(environ.get(name, "") for name in names)
    restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"forge/{run}/{restarts}/{_attempts[world.where]}"


def leave_rendezvous(world: World, store: Store) -> None:
    """Count this rank as gone; rank 0 waits up to _LEAVE_SECONDS for the others, since it hosts the store."""
    deadline = time.monotonic() + _LEAVE_SECONDS

    def leave() -> None:
        store.add("gone", 1)
        if world.rank == 0:
            _wait_until(lambda: store.add("gone", 0) >= world.world_size, deadline)

    with contextlib.suppress(RuntimeError):  # a rank or the store died: the job ends in any case
        run_with_timeout(_LEAVE_SECONDS, leave, _SILENT)


def _description(world: World, device: torch.device, facts: Mapping[str, str]) -> dict[str, Any]:
    host = socket.gethostname()
    try:  # equal for two processes that reach each other over the loopback interface
        with open("/proc/sys/kernel/random/boot_id") as file:
            network = f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        network = host
    cuda = device.type == "cuda"
    common = {"torch": torch.__version__, "world size": world.world_size, "device": device.type}
    return {
        "host": host,
        "pid": os.getpid(),
        "network": network,
        "device": str(device),
        "gpu": str(torch.cuda.get_device_properties(device).uuid) if cuda else None,
        "facts": {str(name): str(value) for name, value in {**common, **facts}.items()},
    }


def _check_in(
    world: World, store: Store, description: dict[str, Any], seconds: float
) -> dict[str, Any]:
    """Write this rank's description and return rank 0's verdict."""
    began = time.monotonic()
    deadline = began + seconds
    soon = min(deadline, began + ANSWER_SECONDS)
    if store.add(f"here/{world.rank}", 1) > 1:
        raise StartError([_duplicate_rank(world, store, soon)])
    store.set(f"rank/{world.rank}", json.dumps(description))
    store.add("arrived", 1)
    if world.rank == 0:
        return _decide(world, store, deadline)
    if not agent_hosts() and not _wait_until(lambda: store.check(["rank/0"]), soon):
        rule = f"has a store at {world.address}, and rank 0 did not check in there within {soon - began:g} s"
        fix = "another job's store holds the port: choose another MASTER_PORT"
        raise invalid("MASTER_PORT", "foreign", world.port, rule, fix, kind=StartError)
    if not _wait_until(
        lambda: _read(store, "verdict", _DECISION) is not None, deadline + _GRACE_SECONDS
    ):
        absent = [rank for rank in range(world.world_size) if not store.check([f"rank/{rank}"])]
        unanswered = Problem("rank", "no_verdict", 0, "gave no answer in time")
        raise StartError([_absence(absent, world) if absent else unanswered])
    verdict = _read(store, "verdict", _DECISION)
    assert verdict is not None
    store.add("read", 1)
    # with a larger world size rank 0 did not wait for this rank
    if verdict["world_size"] != world.world_size:
        rule = f"must be that of rank 0, {verdict['world_size']}"
        raise invalid("WORLD_SIZE", "mismatch", world.world_size, rule, kind=StartError)
    return verdict


def _duplicate_rank(world: World, store: Store, deadline: float) -> Problem:
    """The process that took this rank before; if it did not describe itself, all ranks are told to end."""
    if _wait_until(lambda: _read(store, f"rank/{world.rank}", _DESCRIPTION) is not None, deadline):
        other = _read(store, f"rank/{world.rank}", _DESCRIPTION) or {}
        rule = f"is here already, on host {other['host']} with pid {other['pid']}"
        fix = "two jobs share this address, or two processes were given one RANK"
        return Problem("rank", "duplicate", world.rank, rule, fix)
    rule = "is here already and did not say who it is"
    fix = f"another process writes to the store at {world.where}: choose another MASTER_PORT"
    trouble = Problem("rank", "undescribed", world.rank, rule, fix)
    store.set("trouble", json.dumps(asdict(trouble)))
    return trouble


def _decide(world: World, store: Store, deadline: float) -> dict[str, Any]:
    """Rank 0: wait for all, compare, tell all. The host of the store leaves last."""
    keys = [f"rank/{rank}" for rank in range(world.world_size)]

    def settled() -> bool:
        all_came = store.add("arrived", 0) >= world.world_size and store.check(keys)
        return all_came or store.check(["trouble"])

    _wait_until(settled, deadline)
    descriptions = {rank: _read(store, key, _DESCRIPTION) for rank, key in enumerate(keys)}
    present = {rank: found for rank, found in descriptions.items() if found is not None}
    absent = [rank for rank in descriptions if rank not in present]
    causes = [_absence(absent, world)] if absent else []
    if absent and store.check(["trouble"]):
        causes = [Problem(**json.loads(store.get("trouble")))]
    remote_hosts = [
        one["store_host"] for one in present.values() if one["network"] != present[0]["network"]
    ]
    verdict = {
        "problems": [asdict(problem) for problem in causes + mismatches(present)],
        "rank_0": remote_hosts[0] if remote_hosts else None,
        "world_size": world.world_size,
    }
    store.set("verdict", json.dumps(verdict))
    if verdict["problems"]:
        others = store.add("arrived", 0) - 1
        _wait_until(lambda: store.add("read", 0) >= others, time.monotonic() + _LEAVE_SECONDS)
    return verdict


def _read(store: Store, key: str, names: set[str]) -> dict[str, Any] | None:
    """The object with keys `names` that a rank wrote under `key`; None without one."""
    if not store.check([key]):
        return None
    try:
        found = json.loads(store.get(key))
    except ValueError:
        return None
    return found if isinstance(found, dict) and found.keys() == names else None


def _absence(absent: list[int], world: World) -> Problem:
    rule = f"({format_ranks(absent)} of {world.world_size}) did not come in time"
    return Problem("ranks", "absent", absent, rule)


def mismatches(present: Mapping[int, dict[str, Any]]) -> list[Problem]:
    """Contradictions between the descriptions of ranks, one for each fact.

    Everything is compared with rank 0; of each fact the first rank that differs is named.
    """
    found: list[Problem] = []
    first = present[0]["facts"]
    for name in sorted({name for one in present.values() for name in one["facts"]}):
        for rank, one in present.items():
            if (value := one["facts"].get(name)) != first.get(name):
                rule = (
                    f"of rank {rank} on host {one['host']} must be that of rank 0 on host {present[0]['host']}, "
                    f"{first.get(name)}"
                )
                found.append(Problem(name, "differs", value, rule))
                break

    owner: dict[str, int] = {}
    for rank, one in present.items():
        if one["gpu"] and owner.setdefault(one["gpu"], rank) != rank:
            rule = f"({one['device']}) is used by ranks {owner[one['gpu']]} and {rank} on host {one['host']}"
            fix = "give each rank its own (LOCAL_RANK, CUDA_VISIBLE_DEVICES)"
            found.append(Problem("gpu", "duplicate", one["gpu"], rule, fix))
    return found


def format_ranks(numbers: list[int]) -> str:
    """`rank 3`, `format_ranks 2, 3`, and for many `format_ranks 2, 3, 4, 5, 6, 7, 8, 9 and 91 more`."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    shown = ", ".join(map(str, numbers[:8]))
    return f"ranks {shown}" + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")


def _wait_until(true: Callable[[], bool], deadline: float) -> bool:
    """True once `true()` is; False at the deadline. Waiting inside the store would print a stack."""
    pause = 0.002
    while not true():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(1.5 * pause, 0.2)
    return True
