"""load_step: one checkpoint and no other, of any layout, and a directory that stays as it is."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from forge_ckpt import CheckpointMismatch, CorruptCheckpoint, Store, load_step
from forge_testing import run_on_ranks
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")


def build(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))


def listing(root):
    return sorted((str(f.relative_to(root)), f.stat().st_mtime_ns) for f in root.rglob("*"))


@pytest.fixture
def parent(tmp_path):
    """Steps 3 and 6 of a store; the weights of each."""
    weights = {}
    with Store(tmp_path / "store") as store:
        for step in (3, 6):
            model = build(step)
            weights[step] = {name: value.clone() for name, value in model.state_dict().items()}
            store.save(step, {"model": model, "cursor": {"at": step}, "callback": [1]})
    return tmp_path / "store", weights


def of_step(wanted, step, saved):
    assert (step, saved["cursor"]) == (wanted, {"at": wanted})


def test_a_step_a_store_and_a_part_of_the_state(parent):
    root, weights = parent
    before = listing(root)
    for path, step in ((root, 6), (root / "step-00000003", 3)):
        state = {"model": build(0), "cursor": {"at": 0}}
        assert load_step(path, state, partial(of_step, step)) == step
        assert state["cursor"] == {"at": step}
        assert all(torch.equal(v, weights[step][n]) for n, v in state["model"].state_dict().items())
    assert listing(root) == before


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", ["data-0.bin", "manifest.json"])
def test_a_damaged_step_is_rejected_and_not_replaced_by_another(parent, name):
    root, _ = parent
    damage(root / "step-00000006" / name)
    before, model = listing(root), build(0)
    with pytest.raises(CorruptCheckpoint, match="step-00000006"):
        load_step(root, {"model": model})
    assert all(map(torch.equal, model.state_dict().values(), build(0).state_dict().values()))
    assert listing(root) == before, "nothing is moved to quarantine"


def test_a_check_an_object_or_the_state_can_reject_a_step(parent):
    root, _ = parent

    class Object:
        def state_dict(self):
            return {"at": 0}

        def load_state_dict(self, state):
            raise TypeError("state of another")

    def refuse(step, saved):
        raise ValueError(f"no step {step}")

    model = build(0)
    with pytest.raises(CorruptCheckpoint, match="no step 6"):
        load_step(root, {"model": model}, refuse)
    with rejects("model.0.weight", code="mismatch", kind=CheckpointMismatch):
        load_step(root, {"model": nn.Sequential(nn.Linear(6, 4))})
    assert all(map(torch.equal, model.state_dict().values(), build(0).state_dict().values()))
    with pytest.raises(TypeError, match="state of another"):
        load_step(root, {"cursor": Object()})
    with rejects("path", str(root / "step-00000009"), "not_found"):
        load_step(root / "step-00000009", {"model": model})
    with rejects("state", "dict", "type"):
        load_step(root, {})


def sharded(root, wanted):
    model = build(0)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    try:
        step = load_step(root, {"model": model, "cursor": {"at": 0}})
    except CorruptCheckpoint as error:
        return str(error)
    found = {name: value.full_tensor() for name, value in model.state_dict().items()}
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    return step


@pytest.mark.distributed
def test_ranks_load_it_together_or_not_at_all(parent):
    root, weights = parent
    assert run_on_ranks(3, sharded, str(root), weights[6]) == [6] * 3
    damage(root / "step-00000006/data-0.bin")
    for text in run_on_ranks(3, sharded, str(root), weights[6]):
        assert "step-00000006" in text
