"""Tagged JSON and names: types survive, anything else is refused by place and type."""

import json
import math
import random
import sys
from collections import OrderedDict, defaultdict

import pytest
import torch

from forge_ckpt import CheckpointMismatch, codec
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")


class Key:
    def __repr__(self):
        return "KEY"


KEY, KIND = Key(), f"{Key.__module__}.Key"


def _same(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(2**200),
        0.1,
        -0.0,
        float("nan"),
        float("inf"),
        -float("inf"),
        "é\ud800\n",
        b"\x00\xff",
        [1, [2.0, (3, ())]],
        {"a": {"$": 1}, "b": {1: "x", None: 2, (1, "y"): 3, False: 4}},
        OrderedDict([("b", 1), ("a", 2)]),
        torch.bfloat16,
        torch.Size([2, 3]),
        random.Random(0).getstate(),
    ],
    ids=repr,
)
def test_value_and_type_survive(value):
    text = codec.dumps(codec.encode(value, "x"))
    assert _same(codec.decode(json.loads(text)), value)


def test_negative_zero_keeps_its_sign():
    assert math.copysign(1, codec.decode(json.loads(codec.dumps(-0.0)))) == -1


@pytest.mark.parametrize(
    ("value", "key", "kind", "code"),
    [
        ({"a": [object()]}, "x['a'][0]", "builtins.object", "type"),
        (defaultdict(list), "x", "collections.defaultdict", "type"),
        (1j, "x", "builtins.complex", "type"),
        ({1, 2}, "x", "builtins.set", "type"),
        ({KEY: 1}, "x key KEY", KIND, "type"),
        ({KEY: 1, "y": [torch.ones(1)]}, "x key KEY", KIND, "type"),
        (OrderedDict(y=torch.ones(1)), "x['y']", "torch.Tensor", "tensor"),
    ],
)
def test_other_objects_are_rejected_by_path_and_type(value, key, kind, code):
    with rejects(key, kind, code):
        codec.encode(value, "x")


@pytest.mark.parametrize(
    ("bad", "key", "value", "code"),
    [
        ({"$": "eval", "v": "1"}, "object", "eval", "tag"),
        ({"$": "size"}, "object", "size", "tag"),
        ({"$": "dtype", "v": "nn"}, "dtype", "nn", "unknown"),
        ({"$": "ndarray", "v": ["object", [0], ""]}, "dtype", "object", "not_numbers"),
    ],
)
def test_unknown_tags_are_rejected(bad, key, value, code):
    with rejects(key, value, code):
        codec.decode(bad)


def test_an_array_without_numpy_is_no_damage(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", None)
    with rejects("numpy", ..., "requires", CheckpointMismatch):
        codec.decode({"$": "ndarray", "v": ["int64", [0], ""]})


@pytest.mark.parametrize(
    ("path", "value", "code"),
    [(3, 3, "type"), ([], [], "type"), (["a", ["list", -1]], ["list", -1], "step")],
)
def test_paths_that_were_not_written_are_rejected(path, value, code):
    with rejects("path", value, code):
        codec.path_from_json(path)


def test_numpy_arrays_are_tagged_and_scalars_rejected():
    numpy = pytest.importorskip("numpy")
    state = numpy.random.RandomState(3).get_state()
    back = codec.decode(json.loads(codec.dumps(codec.encode(state, "x"))))
    other = numpy.random.RandomState()
    other.set_state(back)
    assert other.randint(1 << 30) == numpy.random.RandomState(3).randint(1 << 30)
    with rejects("x", "numpy.float64", "numpy_scalar"):
        codec.encode(numpy.float64(1), "x")
    with rejects("x", "object", "dtype"):
        codec.encode(numpy.array([None]), "x")


def test_leaves_are_tensors_and_largest_subtrees_without():
    t = torch.zeros(1)
    state = {"m": {"a.b": t, "n": {"x": 1}}, "o": {0: [t, {"k": (2,)}], "p": ()}, "l": {"c": 3}}
    leaves, paths = codec.flatten(state)
    assert list(leaves) == ["m.a.b", "m.n", "o.0.0", "o.0.1", "o.p", "l"]
    rebuilt = {}
    for name, path in paths.items():
        assert codec.path_from_json(json.loads(json.dumps(codec.path_to_json(path)))) == path
        codec.set_element(rebuilt, path, leaves[name])
    assert rebuilt == state


def test_two_leaves_of_one_name_are_rejected():
    with rejects("a.b.c", ..., "duplicate"):
        codec.flatten({"a": {"b.c": torch.zeros(1), "b": {"c": torch.zeros(1)}}})


def test_a_key_of_another_type_above_a_tensor_is_rejected():
    with rejects("a", "float", "key"):
        codec.flatten({"a": {1.5: torch.zeros(1)}})
