"""A save in the background holds what was there at the call, whatever happens to the state afterwards."""

import copy
import gc
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from forge_ckpt import RNGState, Store
from forge_testing import run_on_ranks
from forge_testing.disk import Disk

numpy = pytest.importorskip("numpy")

pytestmark = pytest.mark.distributed


def _tensors(value):
    """Views, layouts and dtypes; each number is ``value``."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    base = torch.full((6, 8), float(value))
    shared = torch.full((5,), value, dtype=torch.int64)
    return {
        "plain": torch.full((3, 4), float(value)),
        "view": base[1:4, ::2],
        "transposed": torch.full((4, 7), float(value)).T,
        "expanded": torch.full((1, 3), float(value)).expand(5, 3),
        "conj": torch.full((3,), complex(value, value)).conj(),
        "neg": torch.full((3,), complex(value, -value)).conj().imag,
        "scalar": torch.tensor(float(value)),
        "empty": torch.zeros(0, 4),
        "bf16": torch.full((9,), float(value), dtype=torch.bfloat16),
        "float8": torch.full((9,), float(value)).to(torch.float8_e4m3fn),
        "bool": torch.full((3,), bool(value % 2)),
        "tied": shared,
        "tied_again": shared,
        "sharded": distribute_tensor(torch.full((5, 3), float(value)), mesh, [Shard(0)]),
        "replicated": distribute_tensor(torch.full((4,), float(value)), mesh, [Replicate()]),
        "parameter": torch.nn.Parameter(torch.full((2, 2), float(value))),
    }


def _objects(value):
    return {"list": [value, {"a": value}], "array": numpy.full(3, value), "t": (value, [value])}


def _state(value):
    return {"t": _tensors(value), "o": _objects(value), "rng": RNGState()}


def _local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _overwrite(state, rng):
    """All that training, or freeing, does to a state."""
    for name, tensor in list(state["t"].items()):
        local = _local(tensor).detach()
        if name == "expanded":
            local = local[:1]
        local.copy_(torch.full_like(local, 1, dtype=torch.float32).to(local.dtype))
        how = int(torch.randint(4, (), generator=rng))
        if how == 1:
            del state["t"][name], tensor, local
        elif how == 2 and type(tensor) is torch.Tensor:
            tensor.set_(torch.full((100,), 3, dtype=tensor.dtype))
    state["o"]["list"][1]["a"] = -5
    state["o"]["list"].append(-5)
    state["o"]["array"][:] = -5
    state["o"]["t"][1][0] = -5
    gc.collect()
    return [torch.full((n,), -7.0) for n in (3, 12, 48, 5, 15)]  # takes the freed memory


def _exact(root, seed):
    rng, disk = torch.Generator().manual_seed(seed), Disk()
    found = []
    with Store(root, keep_last=9) as store:
        for value in (2, 4, 6):
            store.wait()
            state = _state(value)
            torch.manual_seed(value)
            wanted = torch.get_rng_state()
            disk.close()
            store.save(value, state, wait=False)
            garbage = _overwrite(state, rng)
            torch.rand(5)
            assert [event.kind for event in store.poll()] == ["staged"]
            disk.open()
            store.wait()
            assert [event.kind for event in store.poll()] == ["written", "committed"]
            back = _state(0)
            back["t"]["expanded"] = back["t"]["expanded"].clone()
            assert store.load(back) == value
            same = torch.equal(torch.get_rng_state(), wanted) or dist.get_rank() > 0
            found.append(_differences(back, value) + ([] if same else ["rng"]))
            del garbage
    disk.restore()
    return found


def _differences(back, value):
    wanted = _tensors(value)
    wrong = [
        name
        for name, tensor in back["t"].items()
        if not torch.equal(_local(tensor).float(), _local(wanted[name]).float())
    ]
    objects = _objects(value)
    arrays = [o.pop("array").tolist() for o in (objects, back["o"])]
    return (
        wrong
        + [name for name in objects if objects[name] != back["o"][name]]
        + (["array"] if arrays[0] != arrays[1] else [])
    )


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_F55_what_changes_after_the_call_is_not_in_the_checkpoint(tmp_path, world, seed):
    assert run_on_ranks(world, _exact, str(tmp_path), seed) == [[[]] * 3] * world


def _train(root, wait, steps=9, every=2):
    """An FSDP2 job that saves while it goes on; its checkpoints, each loaded again."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer, "seen": {"steps": 0}}
    with Store(root, keep_last=99) as store:
        for step in range(1, steps + 1):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            state["seen"]["steps"] = step
            if step % every == 0:
                store.save(step, state, wait=wait)
    return [p.full_tensor().detach() for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_job_that_does_not_wait_saves_the_bytes_of_one_that_does(tmp_path):
    """Every checkpoint, byte for byte: weights, moments, the manifest."""
    ends = [run_on_ranks(2, _train, str(tmp_path / str(wait)), wait) for wait in (True, False)]
    assert all(map(torch.equal, ends[0][0], ends[1][0]))
    files = {path.relative_to(tmp_path / "True") for path in (tmp_path / "True").glob("*/*")}
    assert len(files) == 4 * 3
    for path in files:
        assert (tmp_path / "True" / path).read_bytes() == (tmp_path / "False" / path).read_bytes()


# ---- order of durability: kills never lose the page cache, so only the order of calls shows it


def _recorded(root, wait):
    """(seconds, call, path) of each rank, on a clock that all processes share."""
    calls, real = [], {"fsync": os.fsync, "rename": os.rename}

    def fsync(fd):
        path = os.readlink(f"/proc/self/fd/{fd}")
        real["fsync"](fd)
        calls.append((time.monotonic_ns(), "fsync", path))

    def rename(source, target):
        calls.append((time.monotonic_ns(), "rename", str(source)))
        real["rename"](source, target)

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"w": distribute_tensor(torch.ones(30, 3), mesh, [Shard(0)]), "n": 1}

    def committed(event):
        calls.append((time.monotonic_ns(), event.kind, ""))

    with Store(root, keep_last=1, on_event=committed) as store:
        store.save(1, state, wait=wait)
        store.wait()
        calls.clear()
        os.fsync, os.rename = fsync, rename
        try:
            store.save(2, state, wait=wait)
            store.wait()
        finally:
            os.fsync, os.rename = real["fsync"], real["rename"]
    return copy.deepcopy(calls)


@pytest.mark.parametrize("wait", [True, False], ids=["sync", "async"])
@pytest.mark.parametrize("world", [1, 3])
def test_a_checkpoint_is_on_the_disk_before_its_name_and_its_name_before_the_old_one_goes(
    tmp_path, world, wait
):
    ranks = run_on_ranks(world, _recorded, str(tmp_path), wait)
    calls = sorted(call for rank in ranks for call in rank)
    renames = [Path(path).name for _, call, path in calls if call == "rename"]
    temporary = next(name for name in renames if name.startswith("step-00000002.tmp-"))
    assert renames == [temporary, "step-00000001"], "committed, then the old one is removed"
    order = [(call, os.path.relpath(path, tmp_path) if path else "") for _, call, path in calls]
    data = [("fsync", f"{temporary}/data-{rank}.bin") for rank in range(world)]
    commit = [
        ("fsync", f"{temporary}/manifest.json"),
        ("fsync", temporary),
        ("rename", temporary),
        ("fsync", "."),
        ("rename", "step-00000001"),
    ]
    written = [entry for entry in order if entry[0] in ("fsync", "rename")]
    assert sorted(written[:world]) == data, "every rank's file first"
    assert written[world:] == [*commit, ("fsync", ".")], (
        "the removal is on the disk before files go"
    )
    places = [place for place, (call, _) in enumerate(order) if call == "committed"]
    assert len(places) == world
    assert min(places) > order.index(commit[-1]), "no rank calls it committed before"
    # rank 0 says that it is written when all files are synced, and before the manifest is
    (said,) = [at for at, call, _ in ranks[0] if call == "written"]
    synced = [at for at, call, path in calls if "data-" in path]
    assert max(synced) < said
    assert said < next(at for at, _, path in calls if path.endswith("manifest.json"))


# ---- a structure is planned once: states whose structure changes in between


def _variants(value):
    """States of nearly the same structure, to be made: a plan of one would write another wrongly."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    numbers = torch.arange(12.0) + 100 * value
    wide, tall = numbers.reshape(3, 4), numbers.reshape(4, 3)
    twin = wide.clone()

    def sharded(placement):
        return lambda: {"a": distribute_tensor(wide, mesh, [placement]), "b": wide + 1, "o": value}

    return [
        lambda: {"a": wide, "b": wide + 1, "o": value},
        lambda: {"a": twin, "b": twin, "o": value},  # tied
        lambda: {"a": tall, "b": tall + 1, "o": value},  # shapes
        lambda: {"a": wide.int(), "b": wide.int() + 1, "o": value},  # of the same size
        lambda: {"b": wide + 1, "a": wide, "o": value},  # order
        lambda: {"a": wide, "b": value, "o": value},  # an object for a tensor
        lambda: {"a": wide, "b": wide + 1, "o": [value] * 3},
        lambda: {"a": {"0": wide, "1": wide + 1}},  # names a.0 and a.1 on four kinds of paths
        lambda: {"a": {0: wide, 1: wide + 1}},
        lambda: {"a": [wide, wide + 1]},
        lambda: {"a": (wide, wide + 1)},
        *map(sharded, (Shard(0), Shard(1), Replicate())),
        lambda: {"a": wide, "b": wide[:, :0], "o": value},
    ]


def _whole(tree):
    if isinstance(tree, torch.Tensor):
        full = tree.full_tensor() if hasattr(tree, "full_tensor") else tree
        return (str(full.dtype), tuple(full.shape), full.tolist())
    if isinstance(tree, dict):
        return {key: _whole(value) for key, value in tree.items()}
    return [type(tree), *map(_whole, tree)] if isinstance(tree, (list, tuple)) else tree


def _empty(tree):
    if isinstance(tree, torch.Tensor):
        return torch.zeros_like(tree)
    if isinstance(tree, dict):
        return {key: _empty(value) for key, value in tree.items()}
    return type(tree)(map(_empty, tree)) if isinstance(tree, (list, tuple)) else None


def _alternate(root, wait):
    """The first variant after and before each, and those that are alike; the pairs that a load found wrong."""
    count, wrong = len(_variants(0)), []
    groups = [((0,), range(count)), (range(7, 11),) * 2, (range(11, 14),) * 2]
    kinds = [kind for a, b in groups for i in a for j in b if i <= j for kind in (i, j)]
    with Store(root, keep_last=2) as store:
        for step, kind in enumerate(kinds, 1):
            state = {"m": _variants(step)[kind]()}
            if kind % 5 == 4:  # a name on this rank alone
                state[f"of_{dist.get_rank()}"] = {"x": torch.full((3,), step + dist.get_rank())}
            wanted, back = _whole(state), _empty(state)
            if isinstance(back["m"].get("a"), (dict, list, tuple)):
                back["m"] = None  # containers as they were saved
            store.save(step, state, wait=wait)
            assert store.load(back) == step
            if _whole(back) != wanted:
                wrong.append((kinds[step - 2], kind))
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("wait", [True, False], ids=["sync", "async"])
def test_states_whose_structure_changes_between_saves(tmp_path, wait):
    assert run_on_ranks(2, _alternate, str(tmp_path), wait) == [[]] * 2
