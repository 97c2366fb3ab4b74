"""Checkpoints of torch's own ``dcp.save`` in and out: real ranks, FSDP2, the usual shapes of state."""

import re
import subprocess
import sys
import textwrap
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from full_state import full, spoiled
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import forge_ckpt
from forge_ckpt import StepExists, Store, read_tensors
from forge_ckpt.dcp import convert_from_dcp, convert_to_dcp
from forge_testing import run_on_ranks
from forge_testing.problems import rejects

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.lane("test"),
]

# Numbers move bit by bit: every comparison is exact.


class Net(nn.Module):
    """Odd sizes, so that shards are uneven and one is empty; a buffer; two parameter groups."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)
        self.one = nn.Parameter(torch.randn(1, 5))
        self.down = nn.Linear(5, 3)

    def forward(self, x):
        return self.down(self.norm(self.up(x)) * self.one)


def build(shape):
    torch.manual_seed(7)
    model = Net()
    if shape == "fsdp 2 x tp 2":  # shards of shards: torch's _StridedShard
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(output_layouts=Replicate())})
        fully_shard(model, mesh=mesh["shard"])
    elif shape is not None:
        names = ("replicate", "shard") if len(shape) == 2 else ("shard",)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        fully_shard(model.up, mesh=mesh)
        fully_shard(model, mesh=mesh)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=0.1)


def train(model, optimizer, steps):
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        model(torch.randn(8, 6, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same(a, b, where=""):
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list):
        assert_same(dict(enumerate(a)), dict(enumerate(b)), where)
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, where
        assert torch.equal(a, b), where
    else:
        assert a == b, where


def save(path, shape, form):
    """Save with torch alone, in one of the forms that projects use; returns the full tensors."""
    model, optimizer = build(shape)
    train(model, optimizer, 2)
    if form == "get_state_dict":
        named, slots = get_state_dict(model, optimizer)
        state = {"model": named, "optimizer": slots}
    elif form == "raw":  # KempnerForge
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    else:  # torchtitan: the model at the top level, the optimizer flat
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        slots = get_optimizer_state_dict(model, optimizer, options=flat)
        state = {**model.state_dict(), "optimizer": slots}
    state["train_state"] = {"step": 2, "seen": torch.tensor(16), "history": [0.5, (1, None)]}
    dcp.save(state, checkpoint_id=path)
    return full({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def load(root, shape, wanted, warm):
    model, optimizer = spoiled(build(shape), train, warm)
    state = {"model": model, "optimizer": optimizer, "train_state": {}}
    with Store(root) as store:
        assert store.load(state) == 2
    assert_same(full({"model": model.state_dict(), "optimizer": optimizer.state_dict()}), wanted)
    seen = state["train_state"].pop("seen")
    assert seen.item() == 16
    assert state["train_state"] == {"step": 2, "history": [0.5, (1, None)]}
    train(model, optimizer, 1)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("form", "saved", "shapes"),
    [
        ("get_state_dict", (4,), [(2,), (4,)]),
        ("get_state_dict", (2, 2), [(3,)]),
        ("raw", (3,), [(2, 2)]),
        ("raw", (2,), [(2,)]),
        ("raw", "fsdp 2 x tp 2", [(3,), "fsdp 2 x tp 2"]),
    ],
)
def test_what_torch_saved_on_ranks_loads_from_a_store(tmp_path, form, saved, shapes):
    wanted = run_on_ranks(_size(saved), save, str(tmp_path / "dcp_2"), saved, form)[0]
    convert_from_dcp(tmp_path / "dcp_2", tmp_path / "store")
    for shape, warm in zip(shapes, (False, True)):
        run_on_ranks(_size(shape), load, str(tmp_path / "store"), shape, wanted, warm)


def _size(shape):
    if shape == "fsdp 2 x tp 2":
        return 4
    return shape[0] * (shape[1] if len(shape) == 2 else 1)


class FlatOptimizer:
    """As torchtitan's container: one flat dict by parameter name."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        return get_optimizer_state_dict(self.model, self.optimizer, options=options)

    def load_state_dict(self, state):
        self.loaded = state


def load_flat(root, wanted):
    model, optimizer = build((dist.get_world_size(),))
    state = {"model": model, "optimizer": FlatOptimizer(model, optimizer)}
    with Store(root) as store:
        store.load(state)
    assert_same(full(model.state_dict()), wanted["model"])
    found = full(state["optimizer"].loaded)
    names = [*state["optimizer"].loaded]
    assert "param_groups.up.weight.lr" in names
    order = ["one", "up.weight", "down.weight", "up.bias", "norm.weight", "norm.bias", "down.bias"]
    for number, name in enumerate(order):
        for slot, value in wanted["optimizer"]["state"][number].items():
            assert torch.equal(found[f"state.{name}.{slot}"], value), (name, slot)


@pytest.mark.lane("quick")
@pytest.mark.distributed
def test_a_flat_state_as_torchtitan_saves_it(tmp_path):
    wanted = run_on_ranks(2, save, str(tmp_path / "step-2"), (2,), "flat")[0]
    convert_from_dcp(tmp_path / "step-2", tmp_path / "store")
    run_on_ranks(3, load_flat, str(tmp_path / "store"), wanted)


def test_names_stay_if_asked(tmp_path):
    model, optimizer = build(None)
    train(model, optimizer, 1)
    named, slots = get_state_dict(model, optimizer)
    dcp.save({"model": named, "optim": slots}, checkpoint_id=tmp_path / "x", no_dist=True)
    convert_from_dcp(tmp_path / "x", tmp_path / "store", 5, positions=False)
    names = [name for name, _ in read_tensors(tmp_path / "store", ["optim.*"])]
    assert "optim.state.up.weight.exp_avg" in names
    with Store(tmp_path / "store", read_only=True) as store:
        state = {"optim": slots}
        assert store.load(state) == 5


def everything():
    torch.manual_seed(0)
    values = {
        "f": torch.randn(3, 4),
        "t": torch.randn(4, 3).t(),
        "bf": torch.randn(5).bfloat16(),
        "f8": torch.randn(5).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False]),
        "complex": torch.randn(2, dtype=torch.complex64),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 7, dtype=torch.int16),
        "nan": torch.tensor([float("nan"), -0.0]),
        "list": [1, {"inner": torch.ones(2)}, "x"],
        "pair": (torch.arange(3), "y", 2.5),
        "odict": OrderedDict(a=1, b=b"\x00\xff"),
        "none": None,
        "inf": float("inf"),
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
    }
    return {"model": {"part": values}, "step": 7}


def equal(a, b):
    if isinstance(a, torch.Tensor):
        bits = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b)]
        return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*bits)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


def blank(value):
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    if isinstance(value, list):
        return [blank(item) for item in value]
    return (torch.zeros(3).long(), "", 0.0) if type(value) is tuple else 0


def test_every_kind_of_value_goes_in_and_out(tmp_path):
    wanted = everything()
    dcp.save(everything(), checkpoint_id=tmp_path / "in", no_dist=True)
    assert convert_from_dcp(tmp_path / "in", tmp_path / "store", 7).name == "step-00000007"
    state = {"model": blank(wanted["model"]), "step": 0}
    # DCP keeps entries of an OrderedDict apart, and does not say that it was one
    wanted["model"]["part"]["odict"] = dict(wanted["model"]["part"]["odict"])
    with Store(tmp_path / "store", read_only=True) as store:
        assert store.load(state) == 7
    assert equal(state, wanted)
    convert_to_dcp(tmp_path / "store", tmp_path / "out")
    again = {"model": blank(wanted["model"]), "step": 0}
    dcp.load(again, checkpoint_id=tmp_path / "out", no_dist=True)
    assert equal(again, wanted)


def save_ours(root):
    model, optimizer = build((dist.get_world_size(),))
    train(model, optimizer, 2)
    with Store(root) as store:
        store.save(2, {"model": model, "optimizer": optimizer})
    return full({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def load_with_torch(path, wanted):
    model, optimizer = build((dist.get_world_size(),))
    train(model, optimizer, 1)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    assert_same(full({"model": model.state_dict(), "optimizer": optimizer.state_dict()}), wanted)


@pytest.mark.slow
@pytest.mark.distributed
def test_torch_loads_what_we_wrote_for_it(tmp_path):
    wanted = run_on_ranks(3, save_ours, str(tmp_path / "store"))[0]
    convert_to_dcp(tmp_path / "store" / "step-00000002", tmp_path / "out")
    run_on_ranks(2, load_with_torch, str(tmp_path / "out"), wanted)


def test_an_optimizer_without_state(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    named, slots = get_state_dict(model, optimizer)
    dcp.save({"model": named, "optimizer": slots}, checkpoint_id=tmp_path / "x", no_dist=True)
    convert_from_dcp(tmp_path / "x", tmp_path / "store", 1)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with Store(tmp_path / "store") as store:
        assert store.load({"model": model, "optimizer": other}) == 1
    assert other.param_groups[0]["lr"] == 0.5


def test_a_state_that_was_not_flattened(tmp_path):
    """A planner may leave nested state whole: one object with the tensors in it."""
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    state = {
        "model": {"a": {"w": torch.arange(3.0)}, "0": [torch.ones(2), "x"]},
        "w": torch.ones(1),
    }
    dcp.save(state, checkpoint_id=tmp_path / "x1", planner=planner, no_dist=True)
    convert_from_dcp(tmp_path / "x1", tmp_path / "store")
    with Store(tmp_path / "store", read_only=True) as store:
        found = blank(state)
        assert store.load(found) == 1
    assert equal(found, state)


DOOR = re.compile(r"\b(torch\.load|import pickle|pickletools|Unpickler|weights_only)\b")


@pytest.mark.slow
def test_pickles_are_read_in_one_function():
    """Nothing but dcp/ reads pickles, and nothing but the verb convert opens that door."""
    root = Path(forge_ckpt.__file__).parent
    for path in root.rglob("*.py"):
        name, text = str(path.relative_to(root)), path.read_text()
        code = re.sub(r'""".*?"""|"[^"\n]*"|#.*', "", text, flags=re.DOTALL)
        assert name.startswith("dcp/") or not DOOR.search(code), name
        if "forge_ckpt.dcp" in code:
            assert name.startswith("dcp/") or name == "verbs/rewrite.py"
    script = "import sys, forge_ckpt; print([m for m in sys.modules if 'forge_ckpt.dcp' in m])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


class Custom:
    pass


def test_invalid_arguments_are_rejected(tmp_path):
    state = {"model": {"w": torch.ones(2)}, "loader": {"x": Custom(), "n": 3}}
    dcp.save(state, checkpoint_id=tmp_path / "x", no_dist=True)
    with rejects("step", "x", "missing"):
        convert_from_dcp(tmp_path / "x", tmp_path / "store")
    with rejects("loader.x", code="pickle", where="--without 'loader.x'") as caught:
        convert_from_dcp(tmp_path / "x", tmp_path / "store", 1)
    assert "Custom" in caught.value.problems[0].value
    convert_from_dcp(tmp_path / "x", tmp_path / "store", 1, without=["*.x"])
    with rejects("step", 1, "order", StepExists):
        convert_from_dcp(tmp_path / "x", tmp_path / "store", 1, without=["*.x"])
    convert_to_dcp(tmp_path / "store", tmp_path / "out")
    with rejects("out", str(tmp_path / "out"), "exists"):
        convert_to_dcp(tmp_path / "store", tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "store").iterdir()) == ["lock", "step-00000001"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "store", "x"]


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["in", "out"])
def test_memory_is_a_tensor_and_not_the_state(tmp_path, direction):
    """64 tensors of 2 MiB, by a process that does nothing else."""
    state = {"model": {f"w{i}": torch.full((2**19,), float(i)) for i in range(64)}}
    dcp.save(state, checkpoint_id=tmp_path / "x", no_dist=True)
    convert_from_dcp(tmp_path / "x", tmp_path / "a", 1)
    call = {
        "in": "convert_from_dcp(root / 'x', root / 'b', 1)",
        "out": "convert_to_dcp(root / 'a', root / 'y')",
    }
    script = f"""
        import re
        from pathlib import Path
        from forge_ckpt.dcp import convert_from_dcp, convert_to_dcp
        def kilobytes(name):
            return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
        root = Path({str(tmp_path)!r})
        before = kilobytes("VmRSS")
        {call[direction]}
        print((kilobytes("VmHWM") - before) / 1024)
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    mib = float(done.stdout)
    assert mib < 64, "code, 5 blocks of 4 MiB and a tensor: 10 to 30; the state has 128"
