"""The check-in before a process group: who came, from where, and whether all run the same thing."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from forge_parallel.start.store import StartError, open_store, within
from forge_parallel.start.world import World

_GRACE_SECONDS = 10.0  # rank 0's verdict on who is missing comes this long before others give up
_GOODBYE_SECONDS = 5.0
_attempts: Counter[str] = Counter()  # every rank starts its groups in the same order


def meet(
    world: World, device: torch.device, seconds: float, facts: Mapping[str, str]
) -> tuple[Store, str | None]:
    """Wait until every rank has come and compare what they say. Raises StartError on all that came.

    Returns a store of this meeting alone, and where other hosts reach rank 0: None if all ranks are on
    one. What is exchanged is JSON.
    """
    if world.world_size == 1:
        return HashStore(), None
    try:
        tcp_store = open_store(world, seconds)
        # groups meet there one after the other, in torchrun's store also those before a restart
        _attempts[world.where] += 1
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"forge/{restarts}/{_attempts[world.where]}", tcp_store)
        mine = {**_about_me(world, device, facts), "reached": tcp_store.host}
        verdict = within(
            seconds + 2 * _GRACE_SECONDS,
            lambda: _check_in(world, store, mine, seconds),
            "the store stopped answering; is rank 0's process stopped?",
        )
    except StartError:
        raise
    except RuntimeError as error:
        cause = f"the store went away ({str(error).splitlines()[0]}); rank 0 or its launcher ended"
        raise StartError(cause) from error
    if verdict["error"]:
        raise StartError(verdict["error"])
    return store, verdict["rank_0"]


def part(world: World, store: Store) -> None:
    """Say goodbye; rank 0 waits a moment for the others' goodbyes, since it hosts the store."""
    deadline = time.monotonic() + _GOODBYE_SECONDS

    def goodbye() -> None:
        store.add("gone", 1)
        if world.rank == 0:
            _poll(lambda: store.add("gone", 0) >= world.world_size, deadline)

    with contextlib.suppress(RuntimeError):  # somebody died: the job is ending anyhow
        within(_GOODBYE_SECONDS, goodbye, "")


def _about_me(world: World, device: torch.device, facts: Mapping[str, str]) -> dict[str, Any]:
    host = socket.gethostname()
    try:  # equal for two processes that reach each other over the loopback interface
        with open("/proc/sys/kernel/random/boot_id") as file:
            place = f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        place = host
    cuda = device.type == "cuda"
    common = {"torch": torch.__version__, "world size": world.world_size, "device": device.type}
    return {
        "host": host,
        "pid": os.getpid(),
        "place": place,
        "device": str(device),
        "gpu": str(torch.cuda.get_device_properties(device).uuid) if cuda else None,
        "facts": {str(name): str(value) for name, value in {**common, **facts}.items()},
    }


def _check_in(world: World, store: Store, mine: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Say who we are and return rank 0's verdict."""
    deadline = time.monotonic() + seconds
    if store.add(f"here/{world.rank}", 1) > 1:
        other = json.loads(store.get(f"rank/{world.rank}"))
        raise StartError(
            f"rank {world.rank} is here already, on host {other['host']} with pid {other['pid']}; two "
            "jobs share this address, or two processes were given one RANK"
        )
    store.set(f"rank/{world.rank}", json.dumps(mine))
    store.add("arrived", 1)
    if world.rank == 0:
        return _judge(world, store, deadline)
    if not _poll(lambda: store.check(["verdict"]), deadline + _GRACE_SECONDS):
        absent = [rank for rank in range(world.world_size) if not store.check([f"rank/{rank}"])]
        raise StartError(_absence(absent, world) if absent else "rank 0 gave no answer in time")
    verdict = json.loads(store.get("verdict"))
    store.add("read", 1)
    if verdict["world_size"] != world.world_size:  # a rank that rank 0 may not know of
        raise StartError(
            f"rank 0 has world size {verdict['world_size']}, this rank {world.world_size}"
        )
    return verdict


def _judge(world: World, store: Store, deadline: float) -> dict[str, Any]:
    """Rank 0: wait for all, compare, tell all. The host of the store leaves last."""
    keys = [f"rank/{rank}" for rank in range(world.world_size)]
    _poll(lambda: store.add("arrived", 0) >= world.world_size and store.check(keys), deadline)
    came = {rank: json.loads(store.get(key)) for rank, key in enumerate(keys) if store.check([key])}
    absent = [rank for rank in range(world.world_size) if rank not in came]
    causes = [_absence(absent, world)] if absent else []
    reached = [one["reached"] for one in came.values() if one["place"] != came[0]["place"]]
    verdict = {
        "error": "; ".join(causes + differences(came)),
        "rank_0": reached[0] if reached else None,
        "world_size": world.world_size,
    }
    store.set("verdict", json.dumps(verdict))
    if verdict["error"]:
        others = store.add("arrived", 0) - 1
        _poll(lambda: store.add("read", 0) >= others, time.monotonic() + _GOODBYE_SECONDS)
    return verdict


def _absence(absent: list[int], world: World) -> str:
    return f"{ranks(absent)} of {world.world_size} did not come in time"


def differences(came: Mapping[int, dict[str, Any]]) -> list[str]:
    """What the ranks' words contradict, a line each.

    Everything is compared with rank 0; of each fact the first rank that differs is named.
    """
    found: list[str] = []
    first = came[0]["facts"]
    for name in sorted({name for one in came.values() for name in one["facts"]}):
        for rank, one in came.items():
            if one["facts"].get(name) != first.get(name):
                found.append(
                    f"rank {rank} on host {one['host']} has {name} {one['facts'].get(name)}, rank 0 on "
                    f"host {came[0]['host']} has {first.get(name)}"
                )
                break
    owner: dict[str, int] = {}
    for rank, one in came.items():
        if one["gpu"] and owner.setdefault(one["gpu"], rank) != rank:
            found.append(
                f"ranks {owner[one['gpu']]} and {rank} on host {one['host']} both use GPU {one['gpu']} "
                f"({one['device']}); give each rank its own (LOCAL_RANK, CUDA_VISIBLE_DEVICES)"
            )
    return found


def ranks(numbers: list[int]) -> str:
    """`rank 3`, `ranks 2, 3`, and for many `ranks 2, 3, 4, 5, 6, 7, 8, 9 and 91 more`."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    shown = ", ".join(map(str, numbers[:8]))
    return f"ranks {shown}" + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")


def _poll(true: Callable[[], bool], deadline: float) -> bool:
    """True once `true()` is; False at the deadline. Waiting inside the store would print a stack."""
    pause = 0.002
    while not true():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(1.5 * pause, 0.2)
    return True
