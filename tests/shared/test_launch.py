"""The shared topic `launch`, by the copy of one package; `check` compares the bytes of the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_resilience._shared.launch import first_address, first_host, step_port
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("n[003-007,9],login", "n003"),
        ("rack[1-2]n[03,5]", "rack1n03"),
        ("n[12]", "n12"),
        ("login,n[1-2]", "login"),
    ],
)
def test_the_first_host_of_a_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize("nodes", ["", "n[1-2"])
def test_a_list_without_a_host(nodes: str) -> None:
    with rejects("SLURM_STEP_NODELIST", nodes, "syntax"):
        first_host(nodes)


@pytest.mark.parametrize(
    ("body", "address"),
    [("echo NodeName=x NodeAddr=10.0.0.7 Port=1", "10.0.0.7"), ("exit 1", "no.such.host.invalid")],
)
def test_a_node_without_a_host_name_has_the_address_that_slurm_has(
    body: str, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\n{body}\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert first_address("no.such.host.invalid,n2") == address


def test_jobs_and_requeues_have_their_own_ports() -> None:
    ports = {step_port(*run) for run in ((7, 0, 0), (8, 0, 0), (7, 1, 0), (7, 0, 1))}
    assert len(ports) == 4
    assert all(20000 <= port < 32768 for port in ports)
