"""Where ranks compute. With `--device cuda --nproc 2` the tests of ranks run there, too."""

from __future__ import annotations

import subprocess
import sys
import unittest
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from forge_parallel import ParallelConfig, make_meshes
from forge_testing import NotOnThisDevice, choose, device, rank_mesh, ranks, run_on_ranks
from forge_testing.devices import DEVICE, NPROC, chosen

pytestmark = pytest.mark.lane("test")

ROOT = Path(__file__).parents[2]


def here() -> tuple[str, str, str, torch.Tensor, dict[str, torch.nn.Parameter]]:
    tensor = torch.full((2,), float(dist.get_rank()), device=device())
    dist.all_reduce(tensor, group=rank_mesh((2,), ("dp_shard",)).get_group())
    meshes = make_meshes(ParallelConfig(device=device().type))
    nested = {"weight": torch.nn.Parameter(tensor[:1].clone())}
    return str(device()), str(tensor.device), str(meshes.device), tensor, nested


@pytest.mark.distributed
def test_each_rank_has_its_device_and_tensors_arrive_on_the_cpu() -> None:
    kind, _ = chosen()
    for rank, (*devices, tensor, nested) in enumerate(run_on_ranks(2, here)):
        assert devices == [f"cuda:{rank}" if kind == "cuda" else "cpu"] * 3
        assert tensor.device.type == nested["weight"].device.type == "cpu"
        assert nested["weight"].requires_grad
    assert device() == torch.device("cpu")


def on_the_host() -> int:
    return torch.ones(3).numel()


def of_auto() -> str:
    return ParallelConfig().device + str(torch.cuda.is_available())


@pytest.mark.distributed
def test_a_function_that_made_nothing_on_the_device_is_no_test_of_it() -> None:
    if chosen()[0] == "cpu":
        assert run_on_ranks(2, on_the_host) == [3, 3]
        assert run_on_ranks(1, of_auto) == ["autoFalse"]
    else:
        with pytest.raises(NotOnThisDevice, match="on_the_host made nothing on device cuda"):
            run_on_ranks(1, on_the_host)


def test_more_ranks_than_devices_are_a_skip_before_any_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(DEVICE, "cuda")
    monkeypatch.setenv(NPROC, "2")
    monkeypatch.setattr(ranks, "_fork", None)
    with pytest.raises(unittest.SkipTest, match="needs 4 GPUs, nproc is 2"):
        run_on_ranks(4, on_the_host)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (("cpu", 2), "^nproc 2 "),
        (("tpu", None), "^device 'tpu' .* cpu, cuda$"),
    ],
)
def test_impossible_devices_are_rejected(given: tuple[str, int | None], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        choose(*given)


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_pytest_rejects_a_missing_device_in_one_line() -> None:
    command = [sys.executable, "-m", "pytest", "--device", "cuda", "--nproc", "2", __file__]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("ERROR: device cuda ")


@pytest.mark.parametrize("nproc", [0, 3])
def test_as_many_ranks_as_there_are_devices(monkeypatch: pytest.MonkeyPatch, nproc: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=f"^nproc {nproc} .* 1 .* 2 CUDA"):
        choose("cuda", nproc)
    monkeypatch.setenv(DEVICE, "cpu")  # restored at the end
    monkeypatch.setenv(NPROC, "1")
    choose("cuda")
    assert chosen() == ("cuda", 2)
