"""The format behind torch's own interface: sharded tensors, process groups, other projects."""

import io
import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from forge_ckpt import (
    CorruptCheckpoint,
    ForgeLoadPlanner,
    ForgeReader,
    ForgeSavePlanner,
    ForgeWriter,
    StepExists,
    Store,
    save_hf,
)
from forge_testing import run_on_ranks
from forge_testing.problems import assert_problem, rejects

_NUMPY = "torch's own object collectives, which dcp uses in a process group, need numpy"  # prose: a reason to skip
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.lane("test"),
]


@pytest.fixture
def group(tmp_path):
    store = dist.FileStore(str(tmp_path / "group"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 3))


def _sharded(seed):
    model = _model(seed)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


def test_fsdp_on_one_rank_saves_and_loads_on_either_layout(tmp_path, group):
    model = _sharded(0)
    assert isinstance(model[0].weight, DTensor)
    with Store(tmp_path / "store") as store:
        store.save(1, {"model": model})
        for other in (_sharded(1), _model(1)):
            assert store.load({"model": other}) == 1
            for name, parameter in other.named_parameters():
                full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                assert torch.equal(full, dict(_model(0).named_parameters())[name])
        store.save(2, {"model": _model(2)})
        store.load({"model": model})
    assert torch.equal(model[1].bias.full_tensor(), _model(2)[1].bias)


def test_replicated_saves_and_partial_is_rejected(tmp_path, group):
    mesh = init_device_mesh("cpu", (1,))
    tensor = distribute_tensor(torch.arange(6.0), mesh, [Replicate()])
    partial = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    with Store(tmp_path / "store") as store:
        store.save(1, {"a": tensor})
        state = {"a": torch.zeros(6)}
        store.load(state)
        assert torch.equal(state["a"], torch.arange(6.0))
        with rejects("a", partial.placements, "partial"):
            store.save(2, {"a": partial})


def test_a_sharded_state_is_not_exported(tmp_path, group):
    tensor = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)), [Shard(0)])
    with rejects("a", ..., "sharded"):
        save_hf(tmp_path / "out", [("a", "a", ())], {"a": tensor})


class Overtaken(ForgeWriter):
    """Another writer makes the directory during the save."""

    def finish(self, metadata, results):
        self.path.mkdir()
        super().finish(metadata, results)


def test_a_path_that_appears_during_a_save_is_kept(tmp_path):
    writer = Overtaken(tmp_path / "a")
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"a": 1}, storage_writer=writer, planner=ForgeSavePlanner())
    assert isinstance(_cause(caught), StepExists)
    assert_problem(_cause(caught), "path", str(tmp_path / "a"), "appeared")
    assert not list((tmp_path / "a").iterdir())


@pytest.mark.parametrize("grouped", [False, True])
def test_any_project_can_use_it_through_dcp(tmp_path, grouped, request):
    if grouped:
        pytest.importorskip("numpy", reason=_NUMPY)
        request.getfixturevalue("group")
    model, path = _model(0), tmp_path / "ckpt"
    writer = ForgeWriter(path)
    dcp.save({"m": model, "k": (1, 2)}, storage_writer=writer, planner=ForgeSavePlanner())
    assert sorted(os.listdir(path)) == ["data-0.bin", "manifest.json"]
    state = {"m": _model(1), "k": None}
    dcp.load(state, storage_reader=ForgeReader(path), planner=ForgeLoadPlanner())
    assert torch.equal(state["m"][0].weight, model[0].weight)
    assert state["k"] == (1, 2)


def test_async_save_through_dcp(tmp_path, group):
    pytest.importorskip("numpy", reason=_NUMPY)
    future = dcp.async_save(
        {"m": _model(0)}, storage_writer=ForgeWriter(tmp_path / "a"), planner=ForgeSavePlanner()
    )
    future.result()
    state = {"m": _model(1)}
    dcp.load(state, storage_reader=ForgeReader(tmp_path / "a"), planner=ForgeLoadPlanner())
    assert torch.equal(state["m"][0].weight, _model(0)[0].weight)


def _cause(caught):
    return next(iter(caught.value.failures.values()))[0]


def test_other_planners_would_pickle_and_are_rejected(tmp_path):
    state = {"a": torch.ones(2), "b": 1}
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state, storage_writer=ForgeWriter(tmp_path / "a"))
    assert_problem(_cause(caught), "planner", "DefaultSavePlanner", "type")
    assert not (tmp_path / "a").exists()
    dcp.save(state, storage_writer=ForgeWriter(tmp_path / "a"), planner=ForgeSavePlanner())
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, storage_reader=ForgeReader(tmp_path / "a"))
    assert_problem(_cause(caught), "planner", "DefaultLoadPlanner", "type")


def test_an_existing_path_is_never_written(tmp_path):
    for attempt in range(2):
        writer = ForgeWriter(tmp_path / "a")
        if attempt == 0:
            dcp.save({"a": 1}, storage_writer=writer, planner=ForgeSavePlanner())
            continue
        with pytest.raises(CheckpointException) as caught:
            dcp.save({"a": 2}, storage_writer=writer, planner=ForgeSavePlanner())
        assert isinstance(_cause(caught), StepExists)
        assert_problem(_cause(caught), "path", str(tmp_path / "a"), "exists")
        writer.discard()
    assert os.listdir(tmp_path) == ["a"]


def test_a_part_of_a_chunk_is_read_by_its_span(tmp_path):
    """Resharding reads boxes inside a saved chunk, strided in its rows."""
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

    tensor = torch.arange(5 * 6 * 7).reshape(5, 6, 7)
    dcp.save({"a": tensor}, storage_writer=ForgeWriter(tmp_path / "a"), planner=ForgeSavePlanner())
    got = torch.zeros(2, 3, 4, dtype=torch.int64)

    class Planner(ForgeLoadPlanner):
        def resolve_tensor(self, read_item):
            return got

        def finish_read(self):
            pass

    item = ReadItem(
        LoadItemType.TENSOR,
        MetadataIndex("a", (0, 0, 0)),
        torch.Size((0, 0, 0)),
        MetadataIndex("a", (0, 0, 0)),
        torch.Size((3, 2, 1)),
        torch.Size((2, 3, 4)),
    )
    with ForgeReader(tmp_path / "a").opened():
        reader = ForgeReader(tmp_path / "a")
        reader.read_data(LoadPlan([item]), Planner())
        reader.close()
    assert torch.equal(got, tensor[3:5, 2:5, 1:5])


def test_damage_arrives_inside_torchs_exception(tmp_path):
    dcp.save(
        {"a": torch.ones(9)}, storage_writer=ForgeWriter(tmp_path / "a"), planner=ForgeSavePlanner()
    )
    (tmp_path / "a" / "data-0.bin").write_bytes(bytes(36))
    state = {"a": torch.full((9,), 5.0)}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, storage_reader=ForgeReader(tmp_path / "a"), planner=ForgeLoadPlanner())
    assert isinstance(_cause(caught), CorruptCheckpoint)
    assert_problem(_cause(caught), "block", 0, "digest")
    assert (state["a"] == 5).all()


FULL = {
    "rows": torch.arange(35.0).reshape(5, 7),
    "cols": torch.arange(21).reshape(3, 7),
    "one": torch.ones(1, 2),
}


def _placed(zero):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: distribute_tensor(
            torch.zeros_like(x) if zero else x, mesh, [Shard(int(name == "cols"))]
        )
        for name, x in FULL.items()
    }


def _dcp_save(path):
    state = {"s": _placed(zero=False) | {"n": (1, 2)}}
    dcp.save(state, storage_writer=ForgeWriter(path), planner=ForgeSavePlanner())


def _dcp_load(path):
    state = _placed(zero=True) | {"n": None}
    dcp.load({"s": state}, storage_reader=ForgeReader(path), planner=ForgeLoadPlanner())
    found = {name: torch.equal(state[name].full_tensor(), x) for name, x in FULL.items()}
    return found, state["n"]


@pytest.mark.slow
@pytest.mark.distributed
def test_three_ranks_write_two_read_and_one_reads(tmp_path):
    pytest.importorskip("numpy", reason=_NUMPY)
    path = tmp_path / "ckpt"
    run_on_ranks(3, _dcp_save, str(path))
    names = [f"data-{rank}.bin" for rank in range(3)]
    assert sorted(os.listdir(path)) == [*names, "manifest.json"]
    for found, value in run_on_ranks(2, _dcp_load, str(path)):
        assert (all(found.values()), value) == (True, (1, 2))
    state = {"s": {name: torch.zeros_like(x) for name, x in FULL.items()} | {"n": 0}}
    dcp.load(state, storage_reader=ForgeReader(path), planner=ForgeLoadPlanner())
    assert all(torch.equal(state["s"][name], x) for name, x in FULL.items())


def test_objects_are_bytes_of_json():
    planner = ForgeSavePlanner()
    planner.set_up_planner({"a": (1,)}, is_coordinator=True)
    (item,) = planner.create_local_plan().items
    data = planner.resolve_data(item)
    assert isinstance(data, io.BytesIO)
    assert data.getvalue() == b'{"$":"tuple","v":[1]}'
