"""Wrapper subclasses have no memory of their own: what they hold is saved and filled."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map_only

from forge_ckpt import Store
from forge_ckpt._shared.file_bytes import byte_view
from forge_ckpt.codec import unwrap
from forge_testing import run_on_ranks
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")


class Wrapper(torch.Tensor):
    """Behaves like the tensor that it holds; detach and views stay wrapped."""

    @staticmethod
    def __new__(cls, held, scale=None):
        return torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=held.device
        )

    def __init__(self, held, scale=None):
        self.held, self._precomputed_scale = held, scale

    def __tensor_flatten__(self):
        return [
            "held",
            *(["_precomputed_scale"] if self._precomputed_scale is not None else []),
        ], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Wrapper(inner["held"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args, kwargs=None):
        args, kwargs = tree_map_only(cls, lambda w: w.held, (args, kwargs or {}))
        out = function(*args, **kwargs)
        kept = ("detach", "view", "slice", "as_strided", "_to_copy", "copy_")
        if function._schema.name.removeprefix("aten::") in kept:
            return tree_map_only(torch.Tensor, cls, out)
        return out


class Two(Wrapper):
    def __tensor_flatten__(self):
        return ["held", "held"], None


def test_F115_what_a_wrapper_holds_is_saved_and_filled(tmp_path):
    a, b = torch.arange(6.0).view(2, 3), torch.arange(6.0, 12.0).view(2, 3)
    state = {"x": {"a": Wrapper(a, torch.tensor(2.0)), "b": Wrapper(b), "tied": Wrapper(b)}}
    assert state["x"]["a"].data_ptr() == state["x"]["b"].data_ptr() == 0
    plain = {"x": {name: torch.zeros(2, 3) for name in ("a", "b", "tied")}}
    again = {"x": {name: Wrapper(torch.zeros(2, 3)) for name in ("a", "b", "tied")}}
    with Store(tmp_path) as store:
        store.save(1, state)
        assert store.inspect(1)["bytes"] == 64 + 24, "two tensors; the tied one once"
        store.load(plain)
        store.load(again)
    for name, wanted in (("a", a), ("b", b), ("tied", b)):
        assert torch.equal(plain["x"][name], wanted)
        assert type(again["x"][name]) is Wrapper
        assert torch.equal(again["x"][name].held, wanted)


def test_F115_memory_that_is_not_there_is_rejected_by_name(tmp_path):
    with rejects("tensor", (2,), "memory", where="Wrapper"):
        byte_view(Wrapper(torch.ones(2)))
    with rejects("", "Two", "subclass"):
        unwrap(Two(torch.ones(2)))
    with Store(tmp_path) as store, rejects("x.a", "Two", "subclass"):
        store.save(1, {"x": {"a": Two(torch.ones(2))}})


def sharded(value, kind):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = torch.full((2, 3), float(value + dist.get_rank()))
    return DTensor.from_local(kind(rows), mesh, [Shard(0)], run_check=False)


def on_ranks(root):
    with Store(root) as store:
        store.save(1, {"x": {"a": sharded(1, Wrapper), "b": sharded(5, Wrapper)}})
        plain = {"x": {"a": sharded(-1, torch.clone), "b": sharded(-1, torch.clone)}}
        again = {"x": {"a": sharded(-1, Wrapper), "b": sharded(-1, Wrapper)}}
        store.load(plain)
        store.load(again)
    found = []
    for name in "ab":
        local = again["x"][name].to_local()
        assert type(local) is Wrapper
        found += [plain["x"][name].to_local().unique().tolist(), local.held.unique().tolist()]
    return found


@pytest.mark.distributed
def test_F115_the_local_part_of_a_dtensor_may_be_a_wrapper(tmp_path):
    first, second = run_on_ranks(2, on_ranks, str(tmp_path))
    assert first == [[1], [1], [5], [5]]
    assert second == [[2], [2], [6], [6]]
