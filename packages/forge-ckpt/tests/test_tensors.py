"""Whole tensors of a checkpoint, one at a time, whatever layout saved it."""

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from forge_ckpt import CorruptCheckpoint, SavedTensors, Store, read_tensors
from forge_testing import run_on_ranks
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

SHAPES = {"rows": (7, 6), "columns": (3, 10), "cube": (2, 5, 6), "vector": (5,), "one": (1, 9)}
CUTS = {"rows": (0, 1), "columns": (1, 0), "cube": (1, 2), "vector": (0, None), "one": (1, None)}


def tensors():
    g = torch.Generator().manual_seed(0)
    found = {name: torch.randn(shape, generator=g) for name, shape in SHAPES.items()}
    found |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4)}
    found["big"] = torch.randn(3, 700_000, generator=g).bfloat16()  # crosses blocks
    return found


def save(root, step=3):
    state = tensors()
    if dist.is_initialized() and dist.get_world_size() == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        for name, cut in CUTS.items():
            places = [Replicate() if dim is None else Shard(dim) for dim in cut]
            state[name] = distribute_tensor(state[name], mesh, places)
        state["big"] = distribute_tensor(state["big"], mesh, [Shard(1), Shard(0)])
    with Store(root) as store:
        store.save(step, {"model": state, "loader": {"cursor": 7}})


@pytest.mark.lane("quick")
@pytest.mark.distributed
@pytest.mark.parametrize("world", [1, 4])
def test_tensors_are_unsharded_whatever_layout_saved_them(tmp_path, world):
    run_on_ranks(world, save, str(tmp_path))
    found = dict(read_tensors(tmp_path))
    wanted = {f"model.{name}": tensor for name, tensor in tensors().items()}
    assert found.keys() == wanted.keys()
    assert all(found[name].dtype == wanted[name].dtype for name in wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_step_or_the_newest_of_a_store_by_patterns(tmp_path):
    with Store(tmp_path) as store:
        for step in (1, 2):
            store.save(step, {"model": {"a": torch.full((2,), step), "b": torch.zeros(1)}})
    newest = dict(read_tensors(tmp_path, ["model.a"]))
    assert newest.keys() == {"model.a"}
    assert newest["model.a"].tolist() == [2, 2]
    older = dict(read_tensors(tmp_path / "step-00000001", ["*.a", "other"]))
    assert older["model.a"].tolist() == [1, 1]


def test_damage_is_found_before_the_tensor_is_given(tmp_path):
    save(tmp_path)
    data = tmp_path / "step-00000003" / "data-0.bin"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with rejects("block", code="digest", kind=CorruptCheckpoint, where=data):
        list(read_tensors(tmp_path))


def test_a_file_that_shrinks_while_it_is_read_is_found(tmp_path):
    with Store(tmp_path) as store:
        store.save(3, {"w": torch.ones(100)})
    with SavedTensors(tmp_path) as saved:
        os.truncate(tmp_path / "step-00000003" / "data-0.bin", 7)
        with rejects("", 7, "truncated", CorruptCheckpoint, where="data-0.bin"):
            saved.read("w")


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda root: root / "nowhere", "not_found"),
        (lambda root: root, "empty"),
        (lambda root: (root / "a.safetensors").touch() or root, "foreign"),
    ],
)
def test_a_path_without_tensors_is_rejected(tmp_path, make, code):
    path = make(tmp_path)
    with rejects("path", str(path), code):
        list(read_tensors(path))


def test_patterns_without_tensors_are_rejected(tmp_path):
    save(tmp_path)
    with rejects("patterns", ["optimizer.*"], "unmatched"):
        list(read_tensors(tmp_path, ["optimizer.*"]))
