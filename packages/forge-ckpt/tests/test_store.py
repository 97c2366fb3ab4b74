"""A store without faults: contents, names, retention, refusals."""

import os
import pickle
import random
import warnings
from collections import OrderedDict, UserDict, defaultdict

import pytest
import torch
from torch import nn

from forge_ckpt import (
    CheckpointMismatch,
    CorruptCheckpoint,
    ForgeReader,
    Keep,
    RNGState,
    StepExists,
    Store,
    StoreInUse,
    load_step,
    load_weights,
    read_tensors,
)
from forge_ckpt._shared.problems import Shown
from forge_ckpt.frozen_base import FrozenBase
from forge_ckpt.verbs.rewrite import prune
from forge_ckpt.write.writer import write_checkpoint
from forge_testing.problems import assert_problem, rejects

pytestmark = pytest.mark.lane("test")


def _model(seed, width=8):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 4))


def _equal(a, b):
    return a.keys() == b.keys() and all(
        torch.equal(
            a[name].contiguous().view(-1).view(torch.uint8), b[name].view(-1).view(torch.uint8)
        )
        for name in a
    )


DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.bool,
    torch.complex64,
]


def test_every_dtype_and_layout_is_bit_equal(tmp_path):
    g = torch.Generator().manual_seed(0)
    tensors = {}
    for dtype in DTYPES:
        bits = torch.randint(0, 2, (6, 8 * dtype.itemsize), generator=g, dtype=torch.uint8)
        base = bits.view(dtype)
        name = str(dtype)
        tensors |= {name: base, f"{name}.t": base.T, f"{name}.step": base[::2, 1:]}
        tensors |= {
            f"{name}.scalar": base[0, 0],
            f"{name}.empty": base[:0],
            name + "e": base[:, None],
        }
    tensors["conj"] = torch.tensor([1 + 2j, 3 - 4j]).conj()
    tensors["expanded"] = torch.arange(3).expand(4, 3)
    tensors["big"] = torch.randint(0, 256, (3 * 2**22 + 77,), generator=g, dtype=torch.uint8)
    tensors["leaf"] = nn.Parameter(torch.ones(3))
    target = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in tensors.items()}
    with Store(tmp_path) as store:
        store.save(0, {"x": tensors})
        assert store.load({"x": target}) == 0
    tensors["conj"] = tensors["conj"].resolve_conj()
    assert _equal({name: t.detach() for name, t in tensors.items()}, target)


def test_containers_types_and_values_come_back(tmp_path):
    t = torch.arange(3.0)
    saved = {"a": (1, [t, {"k": t + 1}]), "b": {0: {"m": t * 2}, "n": float("inf")}, "c": (1, 2)}
    fresh = {"a": (0, [t * 0, {"k": t * 0}]), "b": {0: {"m": t * 0}, "n": 0.0}, "c": None}
    inner, scalar = fresh["a"][1][0], {"x": fresh, "y": 0}
    with Store(tmp_path) as store:
        store.save(5, {"x": saved, "y": 7})
        store.load(scalar)
    assert str(fresh) == str(saved)
    assert scalar["y"] == 7
    assert fresh["a"][1][0] is inner, "tensors are filled in place"


def test_module_and_a_fresh_torch_optimizer(tmp_path):
    model, other = _model(0), _model(1)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(6, 4)).square().sum().backward()
        optimizer.step()
    fresh = torch.optim.AdamW(other.parameters(), lr=7.0)
    with Store(tmp_path) as store:
        store.save(2, {"model": model, "optimizer": optimizer})
        assert store.load({"model": other, "optimizer": fresh}) == 2
    assert _equal(model.state_dict(), other.state_dict())
    a, b = optimizer.state_dict(), fresh.state_dict()
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys()
    assert all(_equal(a["state"][i], b["state"][i]) for i in a["state"])


def test_a_subset_of_names_loads(tmp_path):
    model = _model(1)
    with Store(tmp_path) as store:
        store.save(1, {"model": _model(0), "step": 1, "loader": {"cursor": 9}})
    with Store(tmp_path, read_only=True) as store:
        assert store.load({"model": model}) == 1
    assert _equal(model.state_dict(), _model(0).state_dict())


def test_tied_tensors_are_stored_once(tmp_path):
    tensor = torch.randn(256, 256)
    target = {"a": torch.zeros(256, 256), "b": torch.zeros(256, 256), "c": torch.zeros(128, 256)}
    with Store(tmp_path) as store:
        store.save(0, {"x": {"a": tensor, "b": tensor, "c": tensor[:128]}})
        assert store.inspect(0)["bytes"] == 256 * 256 * 4 + 128 * 256 * 4
        store.load({"x": target})
    assert torch.equal(target["a"], tensor)
    assert torch.equal(target["b"], tensor)
    assert torch.equal(target["c"], tensor[:128])


class Ends(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.emb, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.emb.weight


def _expanded():
    return torch.full((1, 3), 7.0).expand(5, 3)


def _inference():
    with torch.inference_mode():
        return torch.full((5, 3), 7.0)


@pytest.mark.parametrize(
    ("make", "value", "code"), [(_expanded, (5, 3), "expanded"), (_inference, ..., "inference")]
)
def test_a_tensor_that_cannot_be_filled_is_rejected_before_another_is(tmp_path, make, value, code):
    with Store(tmp_path) as store:
        store.save(1, {"m": {"first": torch.ones(3), "odd": torch.ones(5, 3)}})
        state = {"m": {"first": torch.zeros(3), "odd": make()}}
        with rejects("m.odd", value, code, CheckpointMismatch):
            store.load(state)
        assert not state["m"]["first"].any()
        state["m"]["odd"] = state["m"]["odd"].clone()
        assert store.load(state) == 1
        assert state["m"]["odd"].eq(1).all()


def test_F96_an_untied_checkpoint_is_not_loaded_into_a_tied_model(tmp_path):
    tied = Ends(True)
    before = tied.emb.weight.detach().clone()
    untied = Ends(False)
    with Store(tmp_path) as store:
        store.save(1, {"m": untied})
        with pytest.raises(
            CheckpointMismatch, match=r"m\.(emb|head)\.weight shares memory .*untie"
        ):
            store.load({"m": tied})
        assert store.steps() == [1]
        assert torch.equal(tied.emb.weight, before)
        with torch.no_grad():
            untied.head.weight.copy_(untied.emb.weight)
        store.save(2, {"m": untied})
        assert store.load({"m": tied}) == 2, "apart, but equal"
        assert torch.equal(tied.emb.weight, untied.emb.weight)
        store.save(3, {"m": tied})
        assert store.load({"m": Ends(False)}) == 3
        assert store.load({"m": Ends(True)}) == 3


def test_F96_views_that_overlap(tmp_path):
    whole = torch.arange(12.0).view(3, 4)
    saved = {"whole": whole, "row": whole[1], "left": whole[:, :2], "right": whole[:, 2:]}
    nan = torch.full((3, 4), float("nan"))
    with Store(tmp_path) as store:
        store.save(1, {"x": saved})
        memory = nan.clone()
        here = {"whole": memory, "row": memory[1], "left": memory[:, :2], "right": memory[:, 2:]}
        assert store.load({"x": here}) == 1
        assert torch.equal(memory, whole)
        store.save(2, {"x": {**saved, "row": whole[1] + 1}})
        with pytest.raises(CheckpointMismatch) as caught:
            store.load({"x": here})
        assert caught.value.key in ("x.left", "x.right", "x.row", "x.whole")
        assert_problem(caught.value, caught.value.key, ..., "tied")
        store.save(3, {"x": {name: tensor * float("nan") for name, tensor in saved.items()}})
        assert store.load({"x": here}) == 3, "nan equals itself"
        store.save(4, {"x": {"left": whole[:, :2] * 2, "right": whole[:, 2:] * 3}})
        assert store.load({"x": {"left": here["left"], "right": here["right"]}}) == 4
        assert memory[0].tolist() == [0, 2, 6, 9]


def test_inspect_reads_the_manifest_only(tmp_path):
    with Store(tmp_path) as store:
        store.save(3, {"m": {"w": torch.zeros(2, 3, dtype=torch.bfloat16)}, "n": 1})
        found = store.inspect(3)
    assert found["tensors"] == {"m.w": {"shape": [2, 3], "dtype": "bfloat16", "bytes": 12}}
    assert found["objects"] == ["n"]
    assert (found["step"], found["bytes"]) == (3, 12)


def test_no_pickle_on_disk_and_none_while_loading(tmp_path, monkeypatch):
    state = {"model": _model(0), "rng": RNGState(), "loader": {"cursor": (1, b"x", {2: 3})}}
    with Store(tmp_path) as store:
        store.save(1, state)

        def refuse(*args, **kwargs):
            raise AssertionError("unpickled something")

        for owner, name in (
            (pickle, "Unpickler"),
            (pickle, "loads"),
            (pickle, "load"),
            (torch, "load"),
        ):
            monkeypatch.setattr(owner, name, refuse)
        assert store.load(state) == 1
    names = {path.name for path in (tmp_path / "step-00000001").iterdir()}
    assert names == {"data-0.bin", "manifest.json"}
    data = (tmp_path / "step-00000001" / "data-0.bin").read_bytes()
    tensors = {**_model(0).state_dict(), "rng": torch.empty(5056, dtype=torch.uint8)}
    aligned = [-(-t.numel() * t.element_size() // 64) * 64 for t in tensors.values()]
    assert len(data) <= sum(aligned), "the data file holds tensor bytes and nothing else"


def test_random_states_continue(tmp_path):
    with Store(tmp_path) as store:
        store.save(0, {"rng": RNGState()})
        want = (random.random(), torch.rand(3))
        store.load({"rng": RNGState()})
    assert random.random() == want[0]
    assert torch.equal(torch.rand(3), want[1])


@pytest.mark.parametrize(
    ("state", "key", "value", "code"),
    [
        ({"m": {"w": torch.zeros(2, 4), "s": 0}}, "m.w", Shown("(2, 4) float32"), "mismatch"),
        (
            {"m": {"w": torch.zeros(2, 3).half(), "s": 0}},
            "m.w",
            Shown("(2, 3) float16"),
            "mismatch",
        ),
        ({"m": {"w": torch.zeros(2, 3)}}, "m.s", ..., "extra"),
        ({"m": {"w": torch.zeros(2, 3), "s": 0, "v": torch.zeros(1)}}, "m.v", ..., "not_saved"),
        ({"m": {"w": torch.zeros(2, 3), "s": torch.zeros(1)}}, "m.s", ..., "object"),
        ({"other": 1}, "other", ..., "missing"),
        ({"m": {"w": torch.zeros(2, 3, device="meta"), "s": 0}}, "m.w", ..., "meta"),
        ({"m": {str(n): torch.zeros(1) for n in range(9)}}, "", 3, "more"),  # of 9 and 2
    ],
)
def test_another_state_is_a_mismatch_and_nothing_moves(tmp_path, state, key, value, code):
    before = repr(state)
    with Store(tmp_path) as store:
        store.save(4, {"m": {"w": torch.ones(2, 3), "s": 1}})
        with rejects(key, value, code, CheckpointMismatch, where="step-00000004") as caught:
            store.load(state)
        assert store.steps() == [4]
    assert repr(state) == before
    assert not (tmp_path / "quarantine").exists()
    assert (caught.value.key, caught.value.code) == ("", "state")


def test_states_that_cannot_be_saved_are_rejected_before_anything_is_written(tmp_path):
    with Store(tmp_path) as store:
        linear = "torch.nn.modules.linear.Linear"
        for bad, key, value, code in [
            ({"a": {"b": object()}}, "a['b']", "builtins.object", "type"),
            ({"a": torch.zeros(2).to_sparse()}, "a", torch.sparse_coo, "dense"),
            ({"a": torch.zeros(2, device="meta")}, "a", torch.strided, "dense"),
            ({"a": [torch.zeros(1), nn.Linear(1, 1)]}, "a.1", linear, "type"),
            ({}, "state", "dict", "type"),
            ([1], "state", "list", "type"),
        ]:
            with rejects(key, value, code):
                store.save(1, bad)
        with rejects("step", -1, "range"):
            store.save(-1, {"a": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


class OwnDict(dict):
    pass


def nested_dicts(depth, **innermost):
    for _ in range(depth):
        innermost = {"a": innermost}
    return innermost


def cyclic(**entries):
    entries["self"] = [entries]
    return entries


def masked(shape):
    return torch.masked.masked_tensor(torch.zeros(shape), torch.ones(shape, dtype=torch.bool))


def nested(layout):
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=layout)


def test_F196_odd_states_are_rejected_by_name_and_are_no_failed_saves(tmp_path, caplog):
    one = torch.zeros(1)
    cases = [
        (cyclic(), "x", ..., "depth"),
        (cyclic(t=one), "x", ..., "depth"),
        (nested_dicts(2000), "x", ..., "depth"),
        (nested_dicts(2000, t=one), "x", ..., "depth"),
        ({"n": [10**4300]}, "x['n'][0]", ..., "digits"),
        ({"n": nested(torch.strided)}, "x.n", "nested", "dense"),
        ({"n": nested(torch.jagged)}, "x.n", "nested", "dense"),
        ({"n": masked(3)}, "x.n", "masked", "dense"),
        ({"n": torch.zeros(2, 2).to_mkldnn()}, "x.n", torch._mkldnn, "dense"),
        ({"n": OwnDict(t=one)}, "x.n", "OwnDict", "mapping"),
        (OwnDict(t=one), "x", "OwnDict", "mapping"),
        (UserDict(t=one), "x", "UserDict", "mapping"),
        (defaultdict(int, t=one), "x", "defaultdict", "mapping"),
    ]
    with Store(tmp_path) as store:
        for wait in (True, False):
            for value, key, shown, code in cases:
                with rejects(key, shown, code):
                    store.save(1, {"x": value}, wait=wait)
        with rejects("step", -1, "range"):
            store.save(-1, {"x": 1})
        assert store.poll() == []
        assert caplog.records == []
        state = {"x": {"n": 1 - 10**4300, "t": OrderedDict(t=one)}}
        store.save(1, state, wait=False)
        assert store.load(found := {"x": None}) == 1
        assert found == state


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (lambda: torch.zeros(3, 4).to_sparse(), torch.sparse_coo),
        (lambda: torch.zeros(3, 4).to_sparse_csr(), torch.sparse_csr),
        (lambda: torch.zeros(3, 4).to_mkldnn(), torch._mkldnn),
        (lambda: nested(torch.strided), "nested"),
        (lambda: nested(torch.jagged), "nested"),
        (lambda: masked((3, 4)), "masked"),
    ],
)
def test_F196_targets_that_are_not_dense_are_rejected_by_name(tmp_path, make, value):
    with Store(tmp_path) as store:
        store.save(1, {"x": {"first": torch.ones(2), "n": torch.ones(3, 4)}})
        state = {"x": {"first": torch.zeros(2), "n": make()}}
        with rejects("x.n", value, "dense", CheckpointMismatch):
            store.load(state)
        assert not state["x"]["first"].any()
        here = {"x": OwnDict(first=torch.zeros(2), n=torch.zeros(3, 4))}
        assert store.load(here) == 1
        assert here["x"]["n"].eq(1).all()


def test_keep_last_and_order(tmp_path):
    with Store(tmp_path, keep_last=2) as store:
        for step in (1, 5, 10, 200_000_000):
            store.save(step, {"v": step})
        assert store.steps() == [10, 200_000_000]
        with rejects("step", 7, "order", where="200000000"):
            store.save(7, {"v": 7})
    with Store(tmp_path, read_only=True) as store:
        state = {"v": 0}
        assert store.load(state) == state["v"] == 200_000_000


def test_a_run_goes_back_to_an_earlier_step(tmp_path):
    state = {"x": torch.zeros(3)}
    with Store(tmp_path, keep_last=9) as store:
        for step in (0, 3, 6, 9):
            state["x"].fill_(step)
            store.save(step, state, wait=step != 9)  # the last one may still be under way
        assert store.load(state, newest=5) == 3
        assert state["x"].tolist() == [3.0] * 3
        assert store.steps() == [0, 3, 6, 9], "a load removes nothing"
        assert store.discard_after(3) == [9, 6]
        assert store.steps() == [0, 3]
        state["x"].fill_(66)
        store.save(6, state)
        with rejects("step", 4, "not_found", where=[0, 3, 6]):
            store.discard_after(4)
        assert store.load(state, newest=100) == 6
        assert state["x"].tolist() == [66.0] * 3
    with Store(tmp_path, read_only=True) as store:
        assert store.load(state, newest=-1) is None
        with rejects("store", str(tmp_path), "read_only"):
            store.discard_after(0)


def test_going_back_passes_a_damaged_step(tmp_path):
    state = {"x": torch.zeros(3)}
    with Store(tmp_path, keep_last=9) as store:
        for step in (0, 3, 6):
            state["x"].fill_(step)
            store.save(step, state)
        (tmp_path / "step-00000003/manifest.json").write_text("{")
        assert store.load(state, newest=3) == 0
        assert [step for step, _ in store.quarantined] == [3]
        assert store.discard_after(0) == [6]


def test_F54_the_same_step_twice(tmp_path):
    with Store(tmp_path) as store:
        store.save(1, {"w": torch.ones(3)})
        inode = (tmp_path / "step-00000001" / "data-0.bin").stat().st_ino
        store.save(1, {"w": torch.ones(3)})  # the same bits: done
        with pytest.raises(StepExists, match="step 1 is already"):
            store.save(1, {"w": torch.zeros(3)})
        assert (tmp_path / "step-00000001" / "data-0.bin").stat().st_ino == inode
        assert {path.name for path in tmp_path.iterdir()} == {"lock", "step-00000001"}
        (tmp_path / "step-00000001" / "data-0.bin").write_bytes(bytes(12))
        store.save(1, {"w": torch.ones(3)})  # what was there is damaged: quarantined, saved again
        state = {"w": torch.zeros(3)}
        assert store.load(state) == 1
    assert torch.equal(state["w"], torch.ones(3))
    assert (tmp_path / "quarantine" / "step-00000001-0").is_dir()


def test_the_error_of_a_second_writer_names_the_first(tmp_path):
    with Store(tmp_path) as store:
        store.save(1, {"v": 1})
        with rejects("path", str(tmp_path), "in_use", StoreInUse, where=f" pid {os.getpid()} "):
            Store(tmp_path)
        with Store(tmp_path, read_only=True) as reader:
            assert reader.load({"v": 0}) == 1
            with rejects("store", str(tmp_path), "read_only"):
                reader.save(2, {"v": 2})
    with Store(tmp_path) as store:
        assert store.steps() == [1]
    assert store.steps() == [1]  # a closed store still lists its folder
    with rejects("store", str(tmp_path), "closed"):
        store.load({"v": 0})


def test_a_file_system_without_flock_is_an_error(tmp_path, monkeypatch, caplog):
    import errno
    import fcntl

    def none(fd, operation):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", none)
    left = tmp_path / "step-00000009.tmp-abc"
    left.mkdir()
    with Store(tmp_path) as store:
        store.save(1, {"v": 1})
    assert "no locks" in caplog.text
    assert left.is_dir(), "without a lock it may be a live writer's"


def test_a_step_that_lost_its_manifest_is_the_newest_of_all_calls(tmp_path):
    state = {"model": torch.zeros(3)}
    with Store(tmp_path, keep_last=9) as store:
        for step in (100, 150, 200, 300):
            store.save(step, state)
    for step in (200, 300):
        (tmp_path / f"step-00000{step}" / "manifest.json").unlink()
    before = sorted(path.name for path in tmp_path.iterdir())
    for call in (
        lambda: load_step(tmp_path, state),
        lambda: load_weights(tmp_path, nn.Module()),
        lambda: list(read_tensors(tmp_path)),
        lambda: prune(tmp_path, last=1),
        lambda: prune(tmp_path, last=1, dry_run=True),
    ):
        with pytest.raises(CorruptCheckpoint, match="step-00000300"):
            call()
    with rejects("step", 250, "order", StepExists):
        write_checkpoint(tmp_path, 250, [], {})
    with Store(tmp_path) as store:
        with rejects("step", 250, "order"):
            store.save(250, state)
        assert sorted(path.name for path in tmp_path.iterdir()) == before
        assert store.load(state, newest=250) == 150
        assert [step for step, _ in store.quarantined] == [200]
        assert store.discard_after(150) == [300], "what is left would be the newest"
        store.save(250, state)
        assert store.load(state) == 250


def test_a_base_is_saved_after_a_step_that_lost_its_manifest(tmp_path):
    model = nn.Linear(2, 2)
    FrozenBase(tmp_path, model, {"weight"}).save()
    (tmp_path / "step-00000000").rename(tmp_path / "step-00000004")
    (tmp_path / "step-00000004" / "manifest.json").unlink()
    FrozenBase(tmp_path, model, {"weight"}).save()
    assert dict(read_tensors(tmp_path))["model.weight"].equal(model.weight)


def test_steps_above_the_wanted_one_do_not_count_in_quarantine_either(tmp_path):
    state = {"x": torch.zeros(3)}
    with Store(tmp_path, keep_last=9) as store:
        for step in (3, 6, 9):
            store.save(step, state)
        for step in (3, 6):
            (tmp_path / f"step-0000000{step}" / "manifest.json").write_text("{")
        assert store.load(state, newest=2) is None
        assert store.steps() == [3, 6, 9]
        with pytest.raises(CorruptCheckpoint):
            store.load(state, newest=6)
        with rejects("quarantine", "step-00000003-0", "earlier", CorruptCheckpoint) as caught:
            store.load(state, newest=5)
        assert len(caught.value.problems) == 2, "not step 6"
        assert store.load(state, newest=2) is None
        assert store.load(state) == 9


@pytest.mark.parametrize("keep_last", [0, -1, True, 1.5])
def test_keep_last_is_a_positive_integer(tmp_path, keep_last):
    with rejects("keep_last", keep_last, "range"):
        Store(tmp_path, keep_last=keep_last)


def test_paths_that_cannot_be_a_store(tmp_path):
    (tmp_path / "file").write_text("x")
    for path, read_only, code in [
        (tmp_path / "file", False, "file"),
        (tmp_path / "file" / "below", False, "not_writable"),
        ("/proc/forge-ckpt", False, "not_writable"),
        (tmp_path / "none", True, "not_found"),
    ]:
        with rejects("path", str(path), code):
            Store(path, read_only=read_only)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("file", "call"),
    [
        (".metadata", "forge-ckpt convert "),
        ("model-00001-of-00002.safetensors", "forge_ckpt.load_hf("),
        ("manifest.json", "ForgeReader"),
    ],
)
def test_F110_the_error_names_the_format_of_a_foreign_directory(tmp_path, file, call):
    (tmp_path / file).write_bytes(b"x")
    for read_only in (False, True):
        with rejects("path", str(tmp_path), "foreign", where=file) as caught:
            Store(tmp_path, read_only=read_only)
        assert call in caught.value.problems[0].fix
    if file != "manifest.json":
        with rejects("path", str(tmp_path), "foreign", where=file):
            ForgeReader(tmp_path).open()
    assert [path.name for path in tmp_path.iterdir()] == [file], "no lock is left there"


@pytest.mark.parametrize("name", ["int1", "int4", "int7", "uint2", "uint4", "bits8", "bits1x8"])
def test_F110_dtypes_without_a_size_are_rejected_by_name(tmp_path, name):
    tensor = torch.zeros(4, dtype=torch.uint8).view(getattr(torch, name))
    with Store(tmp_path) as store, rejects("x.a", tensor.dtype, "dtype"):
        store.save(1, {"x": {"a": tensor}})
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_left_overs_of_dead_writers_go(tmp_path):
    left = tmp_path / "step-00000009.tmp-0123abcd"
    left.mkdir()
    (left / "data-0.bin").write_bytes(b"x")
    (tmp_path / "notes.tmp-mine").mkdir()
    with Store(tmp_path, read_only=True) as store:
        assert store.load({"v": 1}) is None
    assert left.exists()
    with Store(tmp_path) as store:
        assert store.load({"v": 1}) is None
    assert {path.name for path in tmp_path.iterdir()} == {"lock", "notes.tmp-mine"}


def test_a_left_over_that_a_failing_disk_keeps_stops_no_run(tmp_path, monkeypatch, caplog):
    """Found by the chaos campaign (suite disk, fault 150 of seed 0): the job ended as a wrong configuration."""

    def fails(path):
        raise OSError(5, "Input/output error", str(path))

    left = tmp_path / "step-00000009.tmp-0123abcd"
    left.mkdir()
    monkeypatch.setattr("forge_ckpt.directories.remove", fails)
    with Store(tmp_path) as store:
        store.save(9, {"v": 1})
        assert store.load({"v": 0}) == 9
    assert left.is_dir()
    (record,) = caplog.records
    assert record.args[:2] == (tmp_path, left.name)
    assert record.args[2].errno == 5


def test_no_warnings_of_torch_reach_the_user(tmp_path):
    with warnings.catch_warnings(), Store(tmp_path) as store:
        warnings.simplefilter("error")
        store.save(1, {"v": torch.zeros(1)})
        store.load({"v": torch.zeros(1)})


def test_a_reader_follows_a_concurrent_writer(tmp_path, monkeypatch):
    with Store(tmp_path, keep_last=1) as writer, Store(tmp_path, read_only=True) as reader:
        writer.save(1, {"v": 1})
        read, state = reader._read, {"v": 0}

        def overtaken(step, *args):
            if step == 1:
                writer.save(2, {"v": 2})  # retention takes step 1 while the reader opens it
            read(step, *args)

        monkeypatch.setattr(reader, "_read", overtaken)
        assert reader.load(state) == state["v"] == 2


class Partly:
    """State of which an older life saved less."""

    def __init__(self, *names):
        self.tensors = {name: torch.zeros(2) for name in names}

    def state_dict(self):
        return self.tensors

    def load_state_dict(self, state):
        self.loaded = set(state)

    def load_fills(self, saved):
        return {name: value for name, value in self.tensors.items() if (name,) in saved}


def test_an_object_lists_what_the_saved_paths_can_fill(tmp_path):
    with Store(tmp_path) as store:
        old = Partly("a")
        old.tensors["a"].fill_(3.0)
        store.save(1, {"it": old, "x": torch.ones(1)})
        more = Partly("a", "b")
        assert store.load({"it": more}) == 1
        assert more.loaded == {"a"}
        assert more.tensors["a"].tolist() == [3.0, 3.0]
        with rejects("it.a", ..., "unclaimed", CheckpointMismatch):
            store.load({"it": Partly("c")})
        store.save(2, {"x": torch.ones(1)})
        assert store.load({"it": more, "x": torch.ones(1)}) == 2
        assert more.loaded == set()


def test_the_best_and_the_milestones_are_kept_over_restarts(tmp_path):
    keep = Keep(last=2, best="val_loss", milestones=lambda step: step == 3)
    values = {1: 5.0, 2: 2.0, 4: 4.0, 6: 3.0}  # others have none and do not compete
    for steps in ([1, 2, 3], [4, 5, 6, 7]):
        with Store(tmp_path, keep=keep) as store:
            for step in steps:
                metrics = {"val_loss": values[step]} if step in values else None
                store.save(step, {"x": torch.ones(3)}, wait=step % 2 == 0, metrics=metrics)
    with Store(tmp_path, read_only=True) as store:
        assert store.steps() == [2, 3, 6, 7]
    with Store(tmp_path, keep=Keep(last=1, best="val_loss", mode="max")) as store:
        store.save(8, {"x": torch.ones(3)}, metrics={"val_loss": 1.0})
        assert store.steps() == [6, 8]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, "1", None, True])
def test_metrics_that_are_no_numbers_are_rejected(tmp_path, value):
    with Store(tmp_path) as store:
        with rejects("metrics.val_loss", value, "finite"):
            store.save(1, {"x": torch.ones(3)}, metrics={"val_loss": value})
        assert store.steps() == []
