"""Tagged JSON and names: types survive, anything else is refused by place and type."""

import json
import math
import random
from collections import OrderedDict, defaultdict

import pytest
import torch

from forge_ckpt import objects, tree

pytestmark = pytest.mark.lane("test")


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
    text = objects.dumps(objects.encode(value, "x"))
    assert _same(objects.decode(json.loads(text)), value)


def test_negative_zero_keeps_its_sign():
    assert math.copysign(1, objects.decode(json.loads(objects.dumps(-0.0)))) == -1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [object()]}, r"x\['a'\]\[0\]: an object of type builtins.object"),
        (defaultdict(list), "collections.defaultdict"),
        (1j, "builtins.complex"),
        ({1, 2}, "builtins.set"),
        ({object(): 1}, "x key <object"),
    ],
)
def test_the_rest_is_refused_by_place_and_type(value, message):
    with pytest.raises(ValueError, match=message):
        objects.encode(value, "x")


@pytest.mark.parametrize("bad", [{"$": "eval", "v": "1"}, {"$": "size"}, {"$": "dtype", "v": "nn"}])
def test_unknown_tags_are_refused(bad):
    with pytest.raises(ValueError, match=r"tag|dtype"):
        objects.decode(bad)


def test_numpy_arrays_are_tagged_and_scalars_refused():
    numpy = pytest.importorskip("numpy")
    state = numpy.random.RandomState(3).get_state()
    back = objects.decode(json.loads(objects.dumps(objects.encode(state, "x"))))
    other = numpy.random.RandomState()
    other.set_state(back)
    assert other.randint(1 << 30) == numpy.random.RandomState(3).randint(1 << 30)
    with pytest.raises(ValueError, match=r"numpy scalar numpy.float64.*\.item\(\)"):
        objects.encode(numpy.float64(1), "x")
    with pytest.raises(ValueError, match="dtype object"):
        objects.encode(numpy.array([None]), "x")


def test_leaves_are_tensors_and_largest_subtrees_without():
    t = torch.zeros(1)
    state = {"m": {"a.b": t, "n": {"x": 1}}, "o": {0: [t, {"k": (2,)}], "p": ()}, "l": {"c": 3}}
    leaves, paths = tree.flatten(state)
    assert list(leaves) == ["m.a.b", "m.n", "o.0.0", "o.0.1", "o.p", "l"]
    rebuilt = {}
    for name, path in paths.items():
        assert tree.path_from_json(json.loads(json.dumps(tree.path_to_json(path)))) == path
        tree.set_element(rebuilt, path, leaves[name])
    assert rebuilt == state


def test_two_leaves_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"a\.b\.c: two entries"):
        tree.flatten({"a": {"b.c": torch.zeros(1), "b": {"c": torch.zeros(1)}}})
