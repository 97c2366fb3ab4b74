"""Probes find what is broken and name it; what is well is not reported."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from forge_resilience import Journal
from forge_resilience.health import (
    BROKEN,
    OK,
    WARN,
    HealthCheck,
    HealthConfig,
    NvmlProbe,
    arrived,
    broken_nodes,
    disk,
    known_answer,
    loopback,
    memory_patterns,
    shared_memory,
)
from forge_resilience.health import probes as device_module
from forge_resilience.health.machine import accelerator_findings
from forge_resilience.health.probes import DRAIN, clocks, sees_token, shared_folder, write_token
from forge_resilience.slurm import exclude_nodes
from forge_testing import run_on_ranks
from forge_testing.problems import assert_problem, rejects

pytestmark = pytest.mark.lane("test")

# ---- the device


@pytest.mark.parametrize("bit", [0, 12, 22])
def test_one_wrong_bit_of_a_matmul_is_found(bit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert known_answer("cpu").state == OK
    real = torch.matmul

    def faulty(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = real(a, b)
        product.view(torch.int32)[3, 5] ^= 1 << bit
        return product

    monkeypatch.setattr(torch, "matmul", faulty)
    found = known_answer("cpu", seed=3)
    assert found.state == BROKEN
    assert "1 of 65536 " in found.value
    assert found.fix == DRAIN


@pytest.mark.parametrize(("stuck", "part"), [(0, 2**20), (1, 2**20), (0, 1000), (1, 1000)])
def test_F197_a_bit_of_memory_that_is_stuck_is_found(stuck: int, part: int, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """In parts of 1,000 words the last one is shorter."""
    monkeypatch.setattr(device_module, "_CHUNK", part)
    assert memory_patterns("cpu", 2).state == OK

    def broken(real: Any) -> Any:
        def write(self: torch.Tensor, value: Any) -> torch.Tensor:
            real(self, value)
            self[7] = self[7] | 64 if stuck else self[7] & ~64
            return self

        return write

    for name in ("fill_", "copy_"):
        monkeypatch.setattr(torch.Tensor, name, broken(getattr(torch.Tensor, name)))
    found = memory_patterns("cpu", 2)
    assert found.state == BROKEN
    assert re.search(r": [1-9]\d* words of 2 MiB", found.value)


class Nothing(TorchDispatchMode):
    """Operations give zeros, as on a device whose kernels never run."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found.zero_() if isinstance(found, torch.Tensor) else found


@pytest.mark.parametrize("probe", [known_answer, memory_patterns])
def test_a_device_that_computes_nothing_is_broken(probe: Any) -> None:
    """It finds nothing wrong, either: what is wrong was counted there, and doctor called it ok."""
    with Nothing():
        found = probe("cpu")
    assert found.state == BROKEN, found.value


class FakeNvmlLibrary:
    """Answers as pynvml does, about a GPU that is not there; `None` is a question that the GPU does not know."""

    class NVMLError(Exception):
        pass

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    NVML_TEMPERATURE_GPU, NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 0, 1
    nvmlEventTypeXidCriticalError = 8

    def __init__(self, errors: Any = 0, rows: Any = (0, 0, 0, 0), temperature: Any = 40, throttle: Any = 4) -> None:  # fmt: skip
        self.errors, self.rows, self.temperature, self.throttle = errors, rows, temperature, throttle  # fmt: skip
        self.xids: list[int] = []

    def _known(self, value: Any) -> Any:
        if value is None:
            raise self.NVMLError
        return value

    def nvmlDeviceGetTotalEccErrors(self, handle: Any, kind: int, since: int) -> int:
        assert (handle, kind, since) == ("gpu", 1, 0)
        return self._known(self.errors)

    def nvmlDeviceGetRemappedRows(self, handle: Any) -> Any:
        return self._known(self.rows)

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int:
        return self._known(self.temperature)

    def nvmlDeviceGetTemperatureThreshold(self, handle: Any, kind: int) -> int:
        return 90

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any) -> int:
        return self._known(self.throttle)

    def nvmlEventSetCreate(self) -> str:
        return "events"

    def nvmlDeviceRegisterEvents(self, handle: Any, kinds: int, events: str) -> None:
        assert (kinds, events) == (8, "events")

    def nvmlEventSetWait_v2(self, events: str, milliseconds: int) -> Any:
        assert milliseconds == 0
        if not self.xids:
            raise self.NVMLError
        return SimpleNamespace(eventData=self.xids.pop(0))


def states(probe: NvmlProbe) -> dict[str, str]:
    return {found.what: found.state for found in probe.findings()}


WELL = {"ECC": OK, "rows": OK, "faults": OK, "heat": OK}


@pytest.mark.parametrize(
    ("change", "what", "state", "words"),
    [
        ({}, "heat", OK, "40 C of 90 C"),
        ({"errors": 2}, "ECC", BROKEN, "2 uncorrected"),
        ({"rows": (1, 1, 1, 0)}, "rows", WARN, "2 rows"),
        ({"rows": (0, 9, 1, 1)}, "rows", BROKEN, "9 rows"),
        ({"xids": [31, 13]}, "faults", WARN, "XID 13, 31"),
        ({"xids": [31, 79]}, "faults", BROKEN, "XID 31, 79"),
        ({"temperature": 88}, "heat", WARN, "88 C of 90 C"),
        ({"throttle": 0x48}, "heat", WARN, "hardware slowdown, heat (hardware)"),
        ({"throttle": 0x44, "temperature": None}, "heat", WARN, "heat (hardware)"),
    ],
)  # fmt: skip
def test_what_a_driver_has_counted(change: dict[str, Any], what: str, state: str, words: str) -> None:  # fmt: skip
    library = FakeNvmlLibrary()
    probe = NvmlProbe(library, "gpu")
    assert states(probe) == WELL
    for name, value in change.items():
        setattr(library, name, value)
    (found,) = (f for f in probe.findings() if f.what == what)
    assert (found.state, bool(found.rule or found.fix)) == (state, state != OK)
    assert words in str(found)
    assert {n: s for n, s in states(probe).items() if n not in ("faults", what)}.items() <= WELL.items()  # fmt: skip


def test_errors_of_an_earlier_process_are_a_warning() -> None:
    assert states(NvmlProbe(FakeNvmlLibrary(errors=5), "gpu"))["ECC"] == WARN


def test_what_a_gpu_does_not_count_is_left_out() -> None:
    quiet = FakeNvmlLibrary(errors=None, rows=None, temperature=None, throttle=None)
    assert states(NvmlProbe(quiet, "gpu")) == {"faults": OK}


def test_only_a_gpu_has_a_driver() -> None:
    assert NvmlProbe.of(torch.device("cpu")) is None


# ---- the node


def test_disks_shared_memory_and_loopback_of_this_machine(tmp_path: Path) -> None:
    assert [f().state for f in (lambda: disk(tmp_path, 1), shared_memory, loopback)] == [OK] * 3
    assert disk(tmp_path, 2**60).state == WARN
    assert disk(tmp_path / "none").state == BROKEN
    assert shared_memory(str(tmp_path / "none")).state == WARN
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_a_warning_and_one_that_changes_bytes_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Changing:
        def __init__(self, *args: Any, **options: Any) -> None:
            pass

        def __enter__(self) -> Any:
            return SimpleNamespace(write=lambda data: 0, seek=lambda n: 0, read=lambda: b"other")

        def __exit__(self, *args: Any) -> None:
            pass

    def full(*args: Any, **options: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    found = disk(tmp_path)
    assert (found.state, bool(found.fix)) == (WARN, True)
    monkeypatch.setattr(tempfile, "TemporaryFile", Changing)
    assert disk(tmp_path).state == BROKEN


def test_the_clock_that_is_off_is_named() -> None:
    assert [f.state for f in clocks([1000.0, 1000.5, 1000.2, 940.0])] == [OK, OK, OK, WARN]
    assert clocks([1000.0, 1000.0, 1090.0])[2].value == "90.0 s ahead of the others"


def test_a_file_of_another_node_is_seen_or_not(tmp_path: Path) -> None:
    name = write_token(tmp_path)
    (tmp_path / "empty").mkdir()
    assert sees_token(tmp_path, name)
    assert not sees_token(tmp_path / "empty", name, seconds=0.1)


def test_a_node_that_lost_a_file_system_differs_from_a_folder_on_a_local_disk() -> None:
    nodes = ["a", "a", "b", "c"]
    assert [f.state for f in shared_folder("r", [True] * 4, nodes)] == [OK] * 4
    lost = shared_folder("r", [True, True, False, True], nodes)
    assert [f.state for f in lost] == [OK, OK, BROKEN, OK]
    local = shared_folder("r", [True, True, False, False], nodes)
    assert [f.state for f in local] == [OK, OK, BROKEN, BROKEN]
    assert local[3].fix != lost[2].fix  # the folder is at fault, not the node


# ---- all ranks


def check_on(nodes: list[str], folders: list[str], clock: list[float]) -> tuple[list[str], Any]:
    rank = dist.get_rank()
    os.environ["SLURMD_NODENAME"] = nodes[rank]
    real = time.time
    time.time = lambda: real() + clock[rank]  # type: ignore[assignment]
    from forge_resilience.health import probes as module

    sees = module.sees_token
    module.sees_token = lambda folder, name: sees(folder, name, seconds=0.2)  # type: ignore[assignment]
    try:
        check = HealthCheck(folders[rank])
        found = check.run()
        return [str(f) for f in found], check.nodes_at_fault(found)
    finally:
        time.time, module.sees_token = real, sees  # type: ignore[assignment]
        del os.environ["SLURMD_NODENAME"]


@pytest.mark.distributed
def test_all_ranks_get_one_report_with_ranks_and_nodes(tmp_path: Path) -> None:
    here, empty = str(tmp_path / "run"), str(tmp_path / "empty")
    for folder in (here, empty):
        Path(folder).mkdir()
    nodes = ["n1", "n2", "n3"]
    well = run_on_ranks(3, check_on, nodes, [here] * 3, [0.0] * 3)
    assert well == [([], [])] * 3
    assert os.listdir(here) == []
    found = run_on_ranks(3, check_on, nodes, [here, here, empty], [0.0, -60.0, 0.0])
    assert (
        len({tuple(line.split(empty)[0].split(here)[0] for line in said) for said, _ in found}) == 1
    )
    (clock, lost), at_fault = found[0]
    assert clock.startswith("rank 1 on n2: clock: 60.0 s ")
    assert lost.startswith("rank 2 on n3: shared folder: ")
    assert at_fault == ["n3"]
    _, common = run_on_ranks(3, check_on, nodes, [here, empty, empty], [0.0] * 3)[0]
    assert common == []  # most nodes: the folder is at fault


def wait_for_others(absent: int) -> tuple[str, list[int]]:
    group = dist.new_group(backend="gloo")
    dist.barrier()  # connections are made one after another, slowly on a busy machine
    if dist.get_rank() == absent:
        dist.barrier()  # it is somewhere else
        return "absent", []
    found, late = arrived(group, 60.0 if absent < 0 else 1.0)
    dist.barrier()
    return str(found), late


@pytest.mark.lane("quick")
@pytest.mark.distributed
def test_a_rank_that_does_not_arrive_is_named_by_rank_0() -> None:
    assert run_on_ranks(3, wait_for_others, -1) == [("ranks: all 3 arrived", [])] * 3
    first, _, other = run_on_ranks(3, wait_for_others, 1)
    assert re.match(r"ranks: rank 1 .* 1 s; .* 3 ", first[0])
    assert first[1] == [1]
    assert "rank 0" in other[0]
    assert "rank 1" not in other[0]


# Forks three ranks, so in a process of its own; rank 1 leaves before the probe.
_DEAD = """
import os, sys
import torch.distributed as dist
from forge_resilience.health.check import arrived

def rank(number):
    dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 3), rank=number, world_size=3)
    dist.barrier()
    if number == 1:
        os._exit(9)
    try:
        print(number, *arrived(timeout_seconds=60.0))
    except RuntimeError as error:
        print(number, "raised:", str(error).splitlines()[0])
    sys.stdout.flush()
    os._exit(0)

for number in range(3):
    if os.fork() == 0:
        rank(number)
for _ in range(3):
    os.wait()
"""


@pytest.mark.slow
@pytest.mark.distributed
def test_a_rank_that_has_ended_is_no_broken_node(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _DEAD, str(tmp_path / "store")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    first, other = sorted(said.splitlines())
    assert first.startswith("0 raised: rank 1 ")
    assert other.startswith("2 raised: ")


def nodes_blamed(folder: str, absent: int) -> list[str]:
    os.environ["SLURMD_NODENAME"] = f"n{dist.get_rank()}"
    config = HealthConfig(timeout_seconds=0.5)
    check = HealthCheck(folder, config=config, group=dist.new_group(backend="gloo"))
    try:
        check.run()
        found = check.run() if dist.get_rank() != absent else []
        dist.barrier()
        return check.nodes_at_fault(found)
    finally:
        del os.environ["SLURMD_NODENAME"]


@pytest.mark.distributed
def test_a_rank_without_a_late_rank_blames_no_node(tmp_path: Path) -> None:
    assert run_on_ranks(3, nodes_blamed, str(tmp_path), 1) == [["n1"], [], []]


def test_memory_is_taken_before_it_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a device lacks is no fault of it, and must not end the run from within the probe."""

    def full(*args: Any, dtype: Any = None, **kwargs: Any) -> Any:
        if dtype == torch.bool:
            raise torch.OutOfMemoryError("CUDA: no memory")
        return real(*args, dtype=dtype, **kwargs)

    real = torch.empty
    monkeypatch.setattr(torch, "empty", full)
    monkeypatch.setattr(torch, "eq", None)
    found = memory_patterns("cpu", 2)
    assert (found.state, "MiB" in found.value) == (OK, False)


def test_a_device_that_fails_in_a_probe_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **options: Any) -> Any:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nand many words")

    monkeypatch.setattr(torch, "matmul", fails)
    (found,) = HealthCheck(tmp_path).run()
    assert found.finding.state == BROKEN
    assert found.finding.value == "RuntimeError: CUDA error: uncorrectable ECC error encountered"


# ---- the node is left out


def journal(folder: Path, *events: tuple[str, dict[str, Any]]) -> Path:
    path = folder / "events.jsonl"
    for name, fields in events:
        Journal(path).record(name, **fields)
    return path


def test_the_broken_nodes_of_the_last_attempt(tmp_path: Path) -> None:
    path = journal(
        tmp_path,
        ("start", {}),
        ("health", {"nodes": ["n1"], "is_known": True}),
        ("resume", {}),
        ("health", {"nodes": ["n4"], "is_known": True}),
        ("mismatch", {"nodes": ["n2", "n3"], "is_known": False}),
        ("mismatch", {"nodes": ["n2"], "is_known": True}),
    )
    assert broken_nodes(path) == ["n4", "n2"]
    command = [sys.executable, "-m", "forge_resilience.health"]
    for place in (path, tmp_path):
        done = subprocess.run([*command, place], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "n4,n2\n")
    Journal(path).record("resume")
    done = subprocess.run([*command, path], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert subprocess.run(command, capture_output=True).returncode == 2


@pytest.mark.parametrize(
    ("nodes", "job", "key", "value", "code"),
    [
        (["n1;reboot"], "1", "nodes", "n1;reboot", "name"),
        (["n 1"], "1", "nodes", "n 1", "name"),
        ([], "1", "nodes", [], "missing"),
        (["n1"], "", "job", None, "missing"),
    ],
)
def test_invalid_names_are_rejected(
    nodes: list[str], job: str, key: str, value: Any, code: str
) -> None:
    with rejects(key, value, code):
        exclude_nodes(nodes, job, environ={})


def test_configurations_name_value_rule_and_fix() -> None:
    wrong = {"every_steps": -1, "memory_mib": 0, "timeout_seconds": 0}
    with rejects("every_steps", -1, "range") as error:
        HealthConfig(**wrong)
    assert {p.key: p.value for p in error.value.problems} == wrong
    for key, value in wrong.items():
        assert_problem(error.value, key, value, "range")


def test_F119_an_accelerator_that_computes_nothing_is_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert {found.state for found in accelerator_findings("")} == {OK}
    monkeypatch.setattr(torch, "matmul", lambda a, b: torch.zeros_like(a))
    found, *_ = accelerator_findings("")
    assert found.state == BROKEN
    assert re.search(r"\d+ ", found.detail)
