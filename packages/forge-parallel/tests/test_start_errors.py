"""Errors of a start, one process at a time; real ranks are in test_start_group.py."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from forge_parallel.start import StartError, World, rendezvous, start_process_group, store
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

SECOND = World(1, 2, 1, 2, "127.0.0.1", 1)


class Store(HashStore):
    host = "127.0.0.1"


def check_in(found: Any) -> None:
    rendezvous._check_in(SECOND, found, {}, 0.0)


@pytest.fixture
def port() -> Iterator[int]:
    """A port on which something listens and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def test_ranks_that_do_not_check_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_GRACE_SECONDS", 0.0)
    with rejects("MASTER_PORT", 1, "foreign", StartError):
        check_in(HashStore())
    found = HashStore()
    found.set("rank/0", "{}")
    with rejects("rank", 0, "no_verdict", StartError):
        check_in(found)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with rejects("ranks", [0], "absent", StartError):
        check_in(HashStore())
    found = HashStore()
    found.add("here/1", 1)
    with rejects("rank", 1, "undescribed", StartError):
        check_in(found)
    found.set("rank/1", json.dumps(dict.fromkeys(rendezvous._DESCRIPTION)))
    with rejects("rank", 1, "duplicate", StartError):
        check_in(found)


def test_a_store_that_is_lost_or_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_GRACE_SECONDS", 0.05)
    monkeypatch.setattr(rendezvous, "open_store", lambda world, seconds: Store())
    monkeypatch.setattr(rendezvous, "_check_in", lambda *args: time.sleep(1.0))
    meet = lambda: rendezvous.rendezvous(SECOND, torch.device("cpu"), 0.0, {})  # noqa: E731
    with rejects("store", ..., "silent", StartError):
        meet()

    def lose(*args: Any) -> None:
        raise RuntimeError("closed")

    monkeypatch.setattr(rendezvous, "_check_in", lose)
    with rejects("store", ..., "lost", StartError, where="closed"):
        meet()


def test_a_store_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    world = World(1, 2, 1, 2, "127.0.0.1", port)
    monkeypatch.setattr(store, "ANSWER_SECONDS", 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(store, "_connect", lambda *args: time.sleep(1.0))
        with rejects("MASTER_PORT", port, "silent", StartError):
            store.open_store(world, 1.0)
    with rejects("MASTER_PORT", port, "taken", StartError):
        store._listen(world)

    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("no store")

    monkeypatch.setattr(store, "TCPStore", fail)
    with rejects("MASTER_ADDR", world.where, "store", StartError):
        store._connect(world, world.address, None, 1.0)


@pytest.mark.parametrize(
    ("cause", "code"),
    [(socket.gaierror(-2, "unknown"), "unknown"), (ConnectionRefusedError(), "unreachable")],
)
def test_an_address_without_a_listener(
    monkeypatch: pytest.MonkeyPatch, cause: OSError, code: str
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise cause

    monkeypatch.setattr(socket, "create_connection", fail)
    monkeypatch.setattr(store, "ANSWER_SECONDS", 0.0)
    with rejects("MASTER_ADDR", SECOND.where, code, StartError):
        store._reachable_address(SECOND, time.monotonic())


def test_ranks_that_cannot_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("no route")

    monkeypatch.setattr(dist, "is_initialized", lambda: False)  # by an earlier test
    monkeypatch.setattr(dist, "init_process_group", fail)
    with rejects("ranks", ..., "connect", StartError, where="rank 0 of 1") as caught:
        start_process_group(World(), "cpu")
    assert "no route" in str(caught.value)
