"""What holds for all tests: which are slow, which need a newer torch, which share a worker of pytest-xdist."""

from __future__ import annotations

import importlib.metadata
import os
import signal
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
SLOW = frozenset((ROOT / "tests" / "slow.txt").read_text().splitlines())

# Words in the names of tests that run schedules which halve the backward, refused below torch 2.13.
HALVES = ("zero_bubble", "zero-bubble", "zero bubble", "zbv", "dualpipev", "cp_ring_pp", "tp_cp_pp", "f05_f06", "f06_clipping", "[tied ends]")  # fmt: skip
TORCH = tuple(int(part) for part in importlib.metadata.version("torch").split(".")[:2])

# Workers share the cores. Two of them with two threads each wait for one another at the end of every small operator:
# three runs of a second took twelve. torch reads it when it is imported, and so does what tests start.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ranks", "ranks of tests that are marked distributed")
    group.addoption(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: NCCL, a GPU a rank"
    )
    group.addoption("--nproc", type=int, help="GPUs to use with --device cuda (default: all)")


def pytest_configure(config: pytest.Config) -> None:
    """A suite under nohup ignores SIGHUP, and would hand that on to the processes that it tests."""
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    device, nproc = config.getoption("--device"), config.getoption("--nproc")
    if (device, nproc) == ("cpu", None):
        return
    from forge_testing.devices import choose

    try:
        choose(device, nproc)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error


@pytest.hookimpl(tryfirst=True)  # before -m chooses, and before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_cuda = config.getoption("--device") == "cuda"
    for item in items:
        if on_cuda and (mark := item.get_closest_marker("cpu_only")):
            item.add_marker(pytest.mark.skip(reason=f"cpu_only: {mark.kwargs['reason']}"))
        if item.nodeid in SLOW:
            item.add_marker(pytest.mark.slow)
        if TORCH < (2, 13) and any(word in item.nodeid.lower() for word in HALVES):
            item.add_marker(
                pytest.mark.skip("schedules that halve the backward must have torch 2.13")
            )
        # Two workers with ranks would have twice the processes, and pools of ranks, on the same cores.
        if item.get_closest_marker("distributed"):
            item.add_marker(pytest.mark.xdist_group("ranks"))
