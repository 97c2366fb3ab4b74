"""A checkpoint whose bytes are sound and whose content no object can use is corrupt too."""

import hashlib
import json
import random

import pytest
import torch

from forge_ckpt import CheckpointMismatch, CorruptCheckpoint, RNGState, Store
from forge_ckpt._shared.problems import ProblemError, invalid
from forge_ckpt.read.planner import check_object
from forge_testing.problems import assert_problem, rejects

pytestmark = pytest.mark.lane("test")


class OfAnotherPackage(ProblemError):
    """The ProblemError of a package's own copy of the module."""


OfAnotherPackage.__module__ = "forge_other._shared.problems"


def problem(text):
    return invalid("n", "bad", text, "is wrong", kind=OfAnotherPackage)


class Counter:
    """Refuses by ``load_checks``; without it, by ``load_state_dict``."""

    def __init__(self, error=ValueError):
        self.n, self.error = 0, error

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, state):
        if state["n"] == "bad":
            raise self.error("bad n")
        self.n = state["n"]


class Checked(Counter):
    def load_checks(self, saved):
        if type(saved) is not dict or type(saved.get("n")) is not int:
            raise problem(saved)

    def load_state_dict(self, state):
        self.n = state["n"]


def state(counter, value):
    counter.n = value
    return {"w": torch.full((3,), float(value)), "rng": RNGState(), "c": counter}


def reseal(root, step, change):
    """``change`` the manifest and give it a digest that fits."""
    path = root / f"step-{step:08d}" / "manifest.json"
    table = json.loads(path.read_bytes())["manifest"]
    change(table)
    body = json.dumps(table, separators=(",", ":")).encode()
    digest = hashlib.sha256(body).hexdigest().encode()
    path.write_bytes(b'{"sha256": "' + digest + b'", "manifest": ' + body + b"}\n")


def deep(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


def put(name, value):
    return lambda table: table["objects"][name].update(value=value)


def short_state(table):
    """The saved torch state, 8 bytes long."""
    entry = table["tensors"]["rng.streams.0.torch"]
    entry["shape"], (chunk,) = [8], entry["chunks"]
    chunk.update(sizes=[8], bytes=8)


def world_size(value):
    return put("rng.world_size", value)


def stream_of_another_number(table):
    for part in ("tensors", "objects"):
        for name in [name for name in table[part] if name.startswith("rng.streams.0.")]:
            entry = table[part].pop(name)
            entry["path"][2] = 7
            table[part][name.replace(".0.", ".7.")] = entry


TAG, NAMELESS, NUMBER, STREAM = ("object", "tag"), ("", "error"), ("n", "bad"), ("", "damaged")
UNUSABLE = {
    "unknown_tag": (put("c", {"$": "eval", "v": "1"}), TAG),
    "tag_without_value": (put("c", {"$": "tuple"}), TAG),
    "unhashable_tag": (put("c", {"$": [], "v": 1}), TAG),
    "unhashable_key": (put("c", {"$": "dict", "v": [[[1], 2]]}), TAG),
    "pairs_of_three": (put("c", {"$": "dict", "v": [[1, 2, 3]]}), NAMELESS),
    "not_a_number": (put("c", {"n": float("nan")}), NAMELESS),
    "float_of_two_bytes": (put("c", {"$": "float", "v": "0000"}), TAG),
    "no_base64": (put("c", {"$": "bytes", "v": "?"}), TAG),
    "ndarray_of_another_shape": (put("c", {"$": "ndarray", "v": ["int64", [5], "AAAA"]}), NAMELESS),
    "ndarray_of_objects": (
        put("c", {"$": "ndarray", "v": ["object", [0], ""]}),
        ("dtype", "not_numbers"),
    ),
    "ndarray_of_one": (put("c", {"$": "ndarray", "v": 1}), TAG),
    "size_beyond_int64": (put("c", {"$": "size", "v": [2**80]}), NAMELESS),
    "unknown_dtype": (put("c", {"$": "dtype", "v": "load"}), ("dtype", "unknown")),
    "900_deep": (put("c", deep(900)), NAMELESS),
    "a_list": (put("c", [1]), NUMBER),
    "a_text": (put("c", {"n": "15"}), NUMBER),
    "no_streams": (world_size(0), STREAM),
    "streams_in_words": (world_size("one"), STREAM),
    "streams_below_none": (world_size(-1), ("world_size", "range")),
    "stream_is_gone": (stream_of_another_number, STREAM),
    "python_state_short": (put("rng.streams.0.python", {"$": "tuple", "v": [3]}), STREAM),
    "python_state_null": (put("rng.streams.0.python", None), STREAM),
    "numpy_state_a_number": (put("rng.streams.0.numpy", 3), STREAM),
    "cuda_state_a_number": (put("rng.streams.0.cuda", {"$": "dict", "v": [[0, 3]]}), STREAM),
    "torch_state_short": (short_state, STREAM),
}


@pytest.mark.lane("quick")
@pytest.mark.parametrize("name", UNUSABLE)
def test_F102_unusable_objects_fall_back_and_nothing_changes_before(tmp_path, caplog, name):
    with Store(tmp_path) as store:
        store.save(1, state(Checked(), 1))
        store.save(2, state(Checked(), 2))
    change, (key, code) = UNUSABLE[name]
    reseal(tmp_path, 2, change)
    counter = Checked()
    found = state(counter, -1)
    with Store(tmp_path) as store:
        assert store.load(found) == 1
        assert store.steps() == [1]
    assert counter.n == 1
    assert found["w"].tolist() == [1, 1, 1]
    (record,) = [record for record in caplog.records if record.name == "forge_ckpt"]
    assert record.args[0] == 2
    assert "\n" not in record.getMessage()
    assert len(record.getMessage()) < 600

    reseal(tmp_path, 1, change)  # the only one: nothing of the state changes
    draws = random.getstate(), torch.get_rng_state()
    counter.n = -1
    found["w"].fill_(-1)
    with (
        Store(tmp_path) as store,
        rejects("path", code="corrupt", kind=CorruptCheckpoint) as caught,
    ):
        store.load(found)
    assert_problem(caught.value, key, code=code)
    assert counter.n == -1
    assert found["w"].tolist() == [-1, -1, -1]
    assert random.getstate() == draws[0]
    assert torch.equal(torch.get_rng_state(), draws[1])


def test_F102_a_check_of_the_caller_sees_step_and_content_before_anything_changes(tmp_path):
    seen = []
    counter = Counter()
    found = state(counter, -1)

    def check(step, saved):
        seen.append((step, saved["c"]["n"], found["w"].tolist(), counter.n))
        if saved["c"]["n"] != step:
            raise ValueError(f"n {saved['c']['n']}, step {step}")

    with Store(tmp_path) as store:
        store.save(1, state(Counter(), 1))
        store.save(2, state(Counter(), 5))
        assert store.load(found, check) == 1
        assert store.quarantined[0][0] == 2
        assert "n 5, step 2" in store.quarantined[0][1]
    assert seen == [(2, 5, [-1, -1, -1], -1), (1, 1, [-1, -1, -1], -1)]


@pytest.mark.parametrize("error", [KeyError, TypeError, RuntimeError, problem])
def test_F102_a_load_state_dict_that_raises_falls_back_over_what_changed(tmp_path, caplog, error):
    with Store(tmp_path) as store:
        store.save(1, state(Counter(), 1))
        store.save(2, state(Counter(), 2))
    reseal(tmp_path, 2, put("c", {"n": "bad"}))
    counter = Counter(error)
    found = state(counter, -1)
    with Store(tmp_path) as store:
        assert store.load(found) == 1
        assert store.steps() == [1]
    assert (counter.n, found["w"].tolist()) == (1, [1, 1, 1])
    assert f"c: load_state_dict raised {type(error('x')).__name__}" in caplog.text


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_F102_an_object_that_rejects_every_checkpoint_is_the_fault_and_nothing_moves(
    tmp_path, steps
):
    with Store(tmp_path) as store:
        for step in range(steps):
            store.save(step, {"c": Counter()})

        class Broken(Counter):
            def load_state_dict(self, state):
                state["m"]

        with pytest.raises(KeyError, match="m") as caught:
            store.load({"c": Broken()})
        (note,) = caught.value.__notes__
        assert f"step-{steps - 1:08d}: c: load_state_dict " in note
        assert store.steps() == list(range(steps))
        assert store.quarantined == []


def test_F102_a_class_of_the_objects_own_is_its_callers_and_raised_at_once(tmp_path):
    class OtherData(ValueError):
        pass

    with Store(tmp_path) as store:
        for step in (1, 2):
            store.save(step, state(Counter(), step))
        reseal(tmp_path, 2, put("c", {"n": "bad"}))
        with pytest.raises(OtherData):
            store.load(state(Counter(OtherData), -1))
        Checked.load_checks, kept = Counter(OtherData).load_state_dict, Checked.load_checks
        try:
            found = state(Checked(), -1)
            Checked.load_checks = lambda self, saved: Counter(OtherData).load_state_dict(saved)
            with pytest.raises(OtherData):
                store.load(found)
        finally:
            Checked.load_checks = kept
        assert found["w"].tolist() == [-1, -1, -1]
        assert store.steps() == [1, 2]


def test_groups_that_are_not_those_of_the_optimizer_are_rejected():
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).named_parameters())
    with rejects("param_groups", ..., "type"):
        check_object(optimizer, "o", {"groups": []})
    saved = {"param_groups": [{"params": [0, 1], "param_names": ["weight", "gain"]}]}
    with rejects("o", "gain", "parameter", CheckpointMismatch):
        check_object(optimizer, "o", saved)


def test_a_cuda_state_that_is_too_short_is_rejected():
    saved = RNGState().state_dict()
    saved["streams"][0]["cuda"] = {0: torch.zeros(8, dtype=torch.uint8)}
    with rejects("cuda", 8, "length"):
        RNGState().load_checks(saved)


def test_an_optimizer_over_fewer_parameters_is_rejected_before_the_model_changed(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    fewer = torch.optim.SGD(model[0].parameters())
    with Store(tmp_path) as store:
        store.save(1, {"model": model, "optimizer": optimizer})
        with torch.no_grad():
            model[0].weight.fill_(7)
        with rejects("optimizer", [4], "groups", CheckpointMismatch, where=[2]):
            store.load({"model": model, "optimizer": fewer})
        assert store.steps() == [1]
    assert model[0].weight.eq(7).all()
