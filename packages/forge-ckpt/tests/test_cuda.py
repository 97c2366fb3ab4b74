"""On a GPU: ranks share one, each with shards and a random stream of its own there."""

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from forge_ckpt import RNGState, Store
from forge_testing import run_on_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.distributed,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.lane("test"),
]


def draw():
    return torch.randint(0, 2**31, (4,), device="cuda").tolist()


def state_of(base):
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    rows = 8 // dist.get_world_size()
    first = base + 10 * rows * dist.get_rank()
    local = torch.arange(first, first + 10 * rows, device="cuda").float().view(rows, 10)
    return {"w": DTensor.from_local(local, mesh, [Shard(0)], run_check=False), "rng": RNGState()}


def show(devices):
    """Ranks of the CPU do not see GPUs; these do."""
    if devices is None:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices


def save(root, devices):
    show(devices)
    torch.cuda.manual_seed(dist.get_rank())
    draw()
    with Store(root) as store:
        store.save(1, state_of(0))
    return draw()


def load(root, devices):
    show(devices)
    torch.cuda.manual_seed(99)
    state = state_of(500)
    with Store(root) as store:
        assert store.load(state) == 1
    local = state["w"].to_local()
    assert local.is_cuda
    return draw(), local.tolist()


def test_cuda_shards_and_streams(tmp_path):
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    drawn = run_on_ranks(2, save, str(tmp_path), devices)
    want = torch.arange(80).float().view(8, 10).tolist()
    back = run_on_ranks(2, load, str(tmp_path), devices)
    assert [numbers for numbers, _ in back] == drawn
    assert [row for _, rows in back for row in rows] == want
    spread = run_on_ranks(4, load, str(tmp_path), devices)
    assert [row for _, rows in spread for row in rows] == want
    assert len({tuple(numbers) for numbers, _ in [*back, *spread]}) == 6


def test_F55_a_device_does_not_overtake_the_copies_of_a_save(tmp_path):
    state = {f"w{i}": torch.full((2**22 + i,), 1.0, device="cuda") for i in range(8)}
    state |= {"host": torch.full((5,), 1.0), "turned": torch.full((64, 30), 1.0, device="cuda").T}
    with Store(tmp_path) as store:
        for step in (1, 2):  # the second uses the pinned memory of the first
            for tensor in state.values():
                tensor.fill_(step)
            store.save(step, {"x": state}, wait=False)
            for tensor in state.values():
                tensor.fill_(-1)
            back = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
            assert store.load({"x": back}) == step
            assert {float(value) for t in back.values() for value in t.unique()} == {step}


def test_F122_a_save_that_waits_copies_in_windows(tmp_path, monkeypatch):
    state = {f"w{i}": torch.arange(5000 * (i + 1), device="cuda") for i in range(6)}
    waits = []
    wait = torch.cuda.Event.synchronize
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda e: (waits.append(1), wait(e)))
    monkeypatch.setattr("forge_ckpt.write.staging._WINDOW_BYTES", 400_000)
    with Store(tmp_path) as store:
        store.save(1, {"x": state})
        assert len(waits) == 3, "840,000 bytes: 3 windows and not 6 tensors"
        back = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        store.load({"x": back})
    assert all(torch.equal(back[name].cpu(), tensor.cpu()) for name, tensor in state.items())
