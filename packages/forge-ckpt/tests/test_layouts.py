"""Saved by N ranks, loaded by M, with the full tensors compared on every rank."""

import os

import pytest
import torch
import torch.distributed as dist
from full_state import full, spoiled
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from forge_ckpt import Store, manifest
from forge_ckpt.files import Directory
from forge_ckpt.read import reader
from forge_testing import run_on_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.lane("test")]

# fp32 numbers move between layouts bit by bit: every comparison of states is exact.


class Net(nn.Module):
    """Odd sizes, so that shards are uneven and one is empty; tied embeddings; a plain buffer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.up = nn.Linear(6, 5)
        self.one = nn.Parameter(torch.randn(1, 5))
        self.down = nn.Linear(5, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.down(self.up(self.norm(self.embed(ids))) * self.one))


def build(shape):
    """The model on a mesh of ``shape`` (None: whole), and an optimizer."""
    torch.manual_seed(7)
    model = Net()
    if shape is not None:
        names = ("replicate", "shard") if len(shape) == 2 else ("shard",)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        fully_shard(model.up, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model, optimizer, steps, seed=0):
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids = torch.randint(0, 11, (8,), generator=g)  # the same on every rank
        loss = nn.functional.cross_entropy(model(ids), ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model, optimizer):
    return {"model": full(model.state_dict()), "optimizer": full(optimizer.state_dict())}


def same(a, b):
    """The first place where two full states differ, or None."""
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return f"keys {sorted(map(str, a.keys() ^ b.keys()))}"
        found = ((key, same(a[key], b[key])) for key in a)
        return next((f"{key}: {what}" for key, what in found if what), None)
    if isinstance(a, list):
        return same(dict(enumerate(a)), dict(enumerate(b)))
    if isinstance(a, torch.Tensor):
        return None if a.dtype == b.dtype and torch.equal(a, b) else "other numbers"
    return None if a == b else f"{a} and {b}"


def save(root, shape, step=3):
    model, optimizer = build(shape)
    train(model, optimizer, 2)
    with Store(root) as store:
        store.save(step, {"model": model, "optimizer": optimizer, "loader": {"cursor": 16}})
        assert store.steps() == [step]
    return whole(model, optimizer)


def load(root, shape, wanted, warm):
    model, optimizer = spoiled(build(shape), train, warm)
    state = {"model": model, "optimizer": optimizer, "loader": {}}
    with Store(root) as store:
        step = store.load(state)
    found = same(wanted, whole(model, optimizer))
    slots = {type(slot).__name__ for s in optimizer.state.values() for slot in s.values()}
    train(model, optimizer, 1, seed=5)  # the slots fit their parameters
    return step, state["loader"], found, slots, full(model.state_dict())


SAVED = {"4": (4,), "2x2": (2, 2), "3": (3,), "1": None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "shapes"),
    [
        ("4", [(2,), None, (3,), (2, 2), (4,)]),
        ("2x2", [(2,), None, (3,), (2, 2), (4,)]),
        ("3", [(4,)]),
        ("1", [(4,), (2, 2)]),
    ],
)
def test_saved_on_some_ranks_loads_on_others(tmp_path, saved, shapes):
    shape = SAVED[saved]
    wanted = run_on_ranks(1 if shape is None else _size(shape), save, str(tmp_path), shape)[0]
    for number, other in enumerate(shapes):
        world = 1 if other is None else _size(other)
        results = run_on_ranks(world, load, str(tmp_path), other, wanted, number % 2 == 1)
        for step, loader, differs, slots, after in results:
            assert (step, loader, differs) == (3, {"cursor": 16}, None), other
            assert slots == ({"Tensor"} if other is None else {"Tensor", "DTensor"})
            assert same(after, results[0][4]) is None


def _size(shape):
    return shape[0] * (shape[1] if len(shape) == 2 else 1)


@pytest.mark.slow
def test_replicas_ties_and_values_are_written_once_and_the_writing_is_spread(tmp_path):
    wanted = run_on_ranks(4, save, str(tmp_path), (2, 2))[0]
    with Directory(tmp_path / "step-00000003") as directory:
        table = manifest.read(directory, 3)
    tensors = table.tensors
    assert tensors["model.head.weight"].chunks == tensors["model.embed.weight"].chunks
    boxes = {(c.file, c.start): c.length for entry in tensors.values() for c in entry.chunks}
    model = {n: t for n, t in wanted["model"].items() if n != "head.weight"}
    slots = [t for s in wanted["optimizer"]["state"].values() for t in s.values()]
    assert sum(boxes.values()) == sum(t.nbytes for t in [*model.values(), *slots])
    sizes = [entry.size for entry in table.files.values()]
    assert sorted(table.files) == [f"data-{rank}.bin" for rank in range(4)]
    assert max(sizes) < 2 * min(sizes), sizes


def placed(root, dims):
    """Tensors sharded on given dims of a mesh of all ranks: to be read in strided pieces."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    made = {
        f"t{i}": distribute_tensor(torch.arange(210.0).reshape(5, 6, 7) + i, mesh, [Shard(dim)])
        for i, dim in enumerate(dims)
    }
    with Store(root) as store:
        if not os.path.exists(os.path.join(root, "step-00000001")):
            store.save(1, {"s": made})
        wanted = full(made)
        for limit in (reader._LARGE, 1):  # staged, and read into the tensors
            reader._LARGE = limit
            for tensor in made.values():
                tensor.to_local().zero_()
            assert store.load({"s": made}) == 1
            if found := same(wanted, full(made)):
                return f"{found}, limit {limit}"
    return None


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_other_dims_on_other_numbers_of_ranks(tmp_path):
    assert run_on_ranks(3, placed, str(tmp_path), (0, 1, 2, 1)) == [None] * 3
    assert run_on_ranks(4, placed, str(tmp_path), (2, 0, 1, 2)) == [None] * 4
    assert run_on_ranks(2, placed, str(tmp_path), (1, 2, 0, 0)) == [None] * 2


def apart(root):
    """Each rank holds names of its own, as pipeline stages do, and a plain tensor that all hold."""
    rank = dist.get_rank()
    mine = {f"stage{rank}": {"w": torch.full((3,), float(rank)), "n": rank}}
    state = {"model": {**mine, "all": torch.ones(2)}}
    with Store(root) as store:
        store.save(1, state)
        return store.inspect(1)


def test_ranks_may_hold_different_names(tmp_path):
    found = run_on_ranks(3, apart, str(tmp_path))
    assert found[0] == found[2]
    names = {f"model.stage{rank}.w" for rank in range(3)} | {"model.all"}
    assert set(found[0]["tensors"]) == names
    with Store(tmp_path) as store:
        state = {"model": {f"stage{r}": {"w": torch.zeros(3), "n": 0} for r in range(3)}}
        state["model"]["all"] = torch.zeros(2)
        store.load(state)
    assert [state["model"][f"stage{r}"]["n"] for r in range(3)] == [0, 1, 2]
    assert [state["model"][f"stage{r}"]["w"][0].item() for r in range(3)] == [0.0, 1.0, 2.0]


def test_a_value_is_that_of_rank_0(tmp_path):
    run_on_ranks(3, value_of_rank, str(tmp_path))
    state = {"v": None}
    with Store(tmp_path) as store:
        store.load(state)
    assert state["v"] == {"rank": 0}


def value_of_rank(root):
    with Store(root) as store:
        store.save(1, {"big": torch.zeros(100), "v": {"rank": dist.get_rank()}})


def tied(root):
    tensor = torch.ones(100)
    with Store(root) as store:
        store.save(1, {"a": tensor, "b": tensor, "c": torch.ones(10)})
        return store.inspect(1)["bytes"], store.inspect(1)["files"]


def test_tied_tensors_that_all_ranks_hold_go_to_one_file(tmp_path):
    assert run_on_ranks(2, tied, str(tmp_path))[0] == (440, {"data-0.bin": 400, "data-1.bin": 40})
