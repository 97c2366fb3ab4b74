"""Rendezvous before a process group: all ranks check in at a store, and rank 0 compares their setup.

Keys of the store, below the prefix of a run: `here/R` counts the processes of rank R, `rank/R` holds its description,
`arrived`, `read` and `gone` count ranks, `trouble` holds a problem found by another rank, `verdict` rank 0's decision.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

import torch
from torch.distributed import HashStore, PrefixStore, Store

from forge_parallel._shared.launch import RUN_NAME
from forge_parallel._shared.problems import Problem
from forge_parallel.start.store import (
    ANSWER_SECONDS,
    StartError,
    agent_hosts,
    open_store,
    run_with_timeout,
    start_error,
)
from forge_parallel.start.world import World

# Rank 0 stops waiting this long before the others do, so that its verdict, with the absent ranks, reaches them.
_GRACE_SECONDS = 10.0
# Rank 0 waits this long for ranks that have yet to read or to leave: a few polls of 0.2 s each.
_LEAVE_SECONDS = 5.0
_SILENT = Problem("store", "silent", ..., "stopped answering", "is rank 0's process stopped?")
_DESCRIPTION = {"host", "pid", "network", "device", "gpu", "facts", "store_host"}
_VERDICT = {"problems", "rank_0", "world_size"}
T = TypeVar("T")
_attempts: Counter[str] = Counter()  # every rank starts its groups in the same order


def rendezvous(
    world: World, device: torch.device, seconds: float, facts: Mapping[str, str]
) -> tuple[Store, str | None]:
    """Wait until all ranks have checked in, and compare their descriptions. Raises StartError on all present ranks.

    Returns a store for this process group only, and the address at which other hosts reach rank 0: None if all ranks
    are on one host. Messages are JSON.
    """
    if world.world_size == 1:
        return HashStore(), None
    try:
        tcp_store = open_store(world, seconds)
        _attempts[world.where] += 1
        store = PrefixStore(_prefix(world), tcp_store)
        description = {**_description(world, device, facts), "store_host": tcp_store.host}

        # the store stops answering if rank 0 is stopped: later than any verdict, which comes within one grace
        limit = seconds + 2 * _GRACE_SECONDS
        verdict = run_with_timeout(
            limit, lambda: _check_in(world, store, description, seconds), _SILENT
        )
    except StartError:
        raise
    except RuntimeError as error:
        rule = f"went away ({str(error).splitlines()[0]}), as rank 0 or its launcher ended"
        raise start_error("store", "lost", ..., rule) from error
    if verdict["problems"]:
        raise StartError([Problem(**one) for one in verdict["problems"]], shared=True)
    return store, verdict["rank_0"]


def _prefix(world: World) -> str:
    """Key prefix of this start of this run: equal on its ranks, and different for other jobs in the store.

    A process starts its groups one after the other, hence `_attempts`. torchrun's store also holds the keys of groups
    before a restart.
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
    """Count this rank as gone. Rank 0, which hosts the store, waits up to _LEAVE_SECONDS for the others."""
    deadline = time.monotonic() + _LEAVE_SECONDS

    def leave() -> None:
        store.add("gone", 1)
        if world.rank == 0:
            _wait_until(lambda: store.add("gone", 0) >= world.world_size, deadline)

    with contextlib.suppress(RuntimeError):  # a rank or the store died: the job ends in any case
        run_with_timeout(_LEAVE_SECONDS, leave, _SILENT)


def _description(world: World, device: torch.device, facts: Mapping[str, str]) -> dict[str, Any]:
    """Host, device and facts of this rank, for the comparison on rank 0."""
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
    # `add` is atomic: of two processes with one rank the second sees 2
    if store.add(f"here/{world.rank}", 1) > 1:
        raise StartError([_duplicate_rank(world, store, soon)])
    store.set(f"rank/{world.rank}", json.dumps(description))
    store.add("arrived", 1)
    if world.rank == 0:
        return _decide(world, store, deadline)

    # rank 0 checks in right after it has opened the store, so a store without it belongs to another job
    if not agent_hosts() and not _wait_until(lambda: store.check(["rank/0"]), soon):
        rule = f"has a store at {world.address}, and rank 0 did not check in there within {soon - began:g} s"
        fix = "another job's store holds the port: choose another MASTER_PORT"
        raise start_error("MASTER_PORT", "foreign", world.port, rule, fix)

    verdict = _wait_until(lambda: _read(store, "verdict", _VERDICT), deadline + _GRACE_SECONDS)
    if not verdict:
        absent = [rank for rank in range(world.world_size) if not store.check([f"rank/{rank}"])]
        unanswered = Problem("rank", "no_verdict", 0, "gave no answer in time")
        raise StartError([_absence(absent, world) if absent else unanswered])
    store.add("read", 1)
    # with a larger world size rank 0 did not wait for this rank
    if verdict["world_size"] != world.world_size:
        rule = f"must be that of rank 0, {verdict['world_size']}"
        raise start_error("WORLD_SIZE", "mismatch", world.world_size, rule)
    return verdict


def _duplicate_rank(world: World, store: Store, deadline: float) -> Problem:
    """Describe the process that has this rank already. If it left no description, make rank 0 end all ranks."""
    other = _wait_until(lambda: _read(store, f"rank/{world.rank}", _DESCRIPTION), deadline)
    if other:
        rule = f"is here already, on host {other['host']} with pid {other['pid']}"
        fix = "two jobs share this address, or two processes were given one RANK"
        return Problem("rank", "duplicate", world.rank, rule, fix)
    rule = "is here already and left no description"
    fix = f"another process writes to the store at {world.where}: choose another MASTER_PORT"
    trouble = Problem("rank", "undescribed", world.rank, rule, fix)
    store.set("trouble", json.dumps(asdict(trouble)))
    return trouble


def _decide(world: World, store: Store, deadline: float) -> dict[str, Any]:
    """Rank 0: wait for all ranks, compare their descriptions, publish the verdict. The host of the store leaves last."""
    keys = [f"rank/{rank}" for rank in range(world.world_size)]

    def is_settled() -> bool:
        all_came = store.add("arrived", 0) >= world.world_size and store.check(keys)
        return all_came or store.check(["trouble"])

    _wait_until(is_settled, deadline)
    descriptions = {rank: _read(store, key, _DESCRIPTION) for rank, key in enumerate(keys)}
    present = {rank: found for rank, found in descriptions.items() if found is not None}
    absent = [rank for rank in descriptions if rank not in present]
    causes = [_absence(absent, world)] if absent else []
    if absent and store.check(["trouble"]):
        causes = [Problem(**json.loads(store.get("trouble")))]

    # the address by which a rank on another host reached the store is one that gloo can use
    network = present[0]["network"]
    remote_hosts = [one["store_host"] for one in present.values() if one["network"] != network]
    verdict = {
        "problems": [asdict(problem) for problem in causes + mismatches(present)],
        "rank_0": remote_hosts[0] if remote_hosts else None,
        "world_size": world.world_size,
    }
    store.set("verdict", json.dumps(verdict))
    # rank 0 ends with an error now, and its store with it: let the others read the verdict first
    if verdict["problems"]:
        others = store.add("arrived", 0) - 1
        _wait_until(lambda: store.add("read", 0) >= others, time.monotonic() + _LEAVE_SECONDS)
    return verdict


def _read(store: Store, key: str, names: set[str]) -> dict[str, Any] | None:
    """Return the object with keys `names` that a rank wrote under `key`, or None."""
    if not store.check([key]):
        return None
    try:
        found = json.loads(store.get(key))
    except ValueError:
        return None
    return found if isinstance(found, dict) and found.keys() == names else None


def _absence(absent: list[int], world: World) -> Problem:
    """Problem of ranks that did not check in."""
    rule = f"({format_ranks(absent)} of {world.world_size}) did not come in time"
    return Problem("ranks", "absent", absent, rule)


def mismatches(present: Mapping[int, dict[str, Any]]) -> list[Problem]:
    """Problems of descriptions that differ from rank 0's, one for each fact, and of GPUs that two ranks use.

    A problem names the first rank that differs.
    """
    found: list[Problem] = []
    first = present[0]
    for name in sorted({name for one in present.values() for name in one["facts"]}):
        wanted = first["facts"].get(name)
        for rank, one in present.items():
            if (value := one["facts"].get(name)) != wanted:
                rule = f"of rank {rank} on host {one['host']} must be that of rank 0 on host {first['host']}, {wanted}"
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
    """Format `rank 3`, `ranks 2, 3`, or at most eight of many: `ranks 2, 3, 4, 5, 6, 7, 8, 9 and 91 more`."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    shown = ", ".join(map(str, numbers[:8]))
    return f"ranks {shown}" + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")


def _wait_until(poll: Callable[[], T], deadline: float) -> T:
    """Call `poll` until its result is true, and return the last one at the deadline.

    Pauses grow from 2 ms to 0.2 s, so that the ranks of a large job do not flood the store. A wait inside the store
    would print a stack.
    """
    pause = 0.002
    while not (found := poll()) and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(1.5 * pause, 0.2)
    return found
