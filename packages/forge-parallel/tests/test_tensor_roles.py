"""Tables of roles: one row for each parameter, and checks that name value, rule and fix."""

from __future__ import annotations

import pytest
import torch
from tensor_models import Model
from torch import nn

from forge_parallel.axes.roles import Role, find_roles, match_roles
from forge_parallel.check_model import check_shards
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)
        self.act = nn.GELU()


def test_modules_of_every_kind_are_found():
    model = Model(kinds="aor", tied=True)
    found = match_roles(model, model.parallel_roles(), strict=True)
    assert found.leaves["head"] == Role("sharded_logits")
    assert found.leaves["layers.0.mixer.q_norm"] == Role("replicate_sum_grad")
    assert found.opaque == ("layers.1.mixer",)
    assert found.experts == ("layers.2.feed_forward.experts",)
    assert found.routed == ("layers.2.feed_forward",)
    assert found.is_routed("layers.2.feed_forward.shared.up_proj")
    assert not found.is_routed("layers.2.mixer.q_proj")


def test_a_row_may_require_multiples():
    for value in ({"role": "colwise", "multiple_of": 2}, Role("colwise", 2), ("colwise", 2)):
        matched = match_roles(Small(), {"up.*": value, "down.*": "rowwise"})
        check_shards(Small(), matched, 3)
        with rejects("up", 6, "divides"):
            check_shards(Small(), matched, 2)


REFUSED = [
    ({"up.*": "colwise"}, "down.weight", ..., "no_row"),
    (
        {"up.*": "colwise", "*.weight": "rowwise", "down.bias": "rowwise"},
        "up.weight",
        ...,
        "rows",
    ),
    ({"up.*": "columns", "down.*": "rowwise"}, "up.*", "columns", "unknown"),
    ({"up.weight": "colwise", "up.bias": "rowwise", "down.*": "rowwise"}, "up", ..., "roles"),
    ({"*": "sequence", "left.*": "rowwise"}, "left.*", ..., "not_found"),
    ({"*.*": "sequence", "act": "vocab"}, "act", "vocab", "parameters"),
    ({"*": "opaque"}, "opaque", ..., "model"),
    ({"up.*": {"name": "colwise"}}, "up.*", {"name": "colwise"}, "keys"),
    ({"up.*": 3}, "up.*", 3, "type"),
    ({"up.*": ("colwise", 0)}, "up.*.multiple_of", 0, "range"),
]


@pytest.mark.parametrize(("table", "key", "value", "code"), REFUSED)
def test_wrong_tables_are_rejected(table, key, value, code):
    with rejects(key, value, code):
        match_roles(Small(), table, strict=True)


def test_regions_that_cross_are_rejected():
    roles = Model(kinds="r").parallel_roles() | {"layers.0.feed_forward.router.*": "opaque"}
    with rejects("layers.0.feed_forward.router", ..., "experts"):
        match_roles(Model(kinds="r"), roles)
    outer = nn.ModuleDict({"part": Small()})
    outer["part"].scale = nn.Parameter(torch.ones(4))
    roles = {"*.up.*": "colwise", "*.down.*": "rowwise", "part.scale": "opaque"}
    with rejects("part", ..., "nested"):
        match_roles(outer, roles)


@pytest.mark.parametrize(
    ("module", "role", "key", "value", "code"),
    [
        (nn.Embedding(4, 4), "colwise", "part", "colwise", "linear"),
        (nn.LayerNorm(4), "norm_over_heads", "part", "norm_over_heads", "norm"),
        (nn.LayerNorm(4), "enter", "part", "enter", "enter"),
        (
            nn.ParameterDict({"gain": nn.Parameter(torch.ones(6))}),
            "by_heads",
            "part.gain",
            6,
            "divides",
        ),
        (nn.Linear(4, 4), "vocab", "part", "vocab", "embedding"),
        (nn.Embedding(4, 4, sparse=True), "vocab", "part", "vocab", "options"),
        (nn.Embedding(5, 4), "vocab", "part", 5, "empty"),
        (nn.Linear(6, 4), "rowwise", "part", 6, "divides"),
    ],
)
def test_modules_that_cannot_be_sharded_are_named(module, role, key, value, code):
    model = nn.ModuleDict({"part": module})
    with rejects(key, value, code):
        check_shards(model, match_roles(model, {"part.*": role}), 4)


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_model_of_many_layers_is_matched_quickly():
    with torch.device("meta"):
        model = Model(kinds="a" * 80)
    assert len(match_roles(model, model.parallel_roles()).leaves) == 80 * 11 + 3


def test_one_parameter_cannot_have_two_layouts():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
            self.head.weight = self.embedding.weight

    model = Tied()
    good = match_roles(model, {"embedding.*": "vocab", "head.*": "sharded_logits"})
    check_shards(model, good, 2)
    for other in ("opaque", "rowwise"):
        with rejects("embedding.weight", ..., "tied"):
            check_shards(model, match_roles(model, {"embedding.*": "vocab", "head.*": other}), 2)


def test_a_role_has_one_name_however_it_is_written():
    for value in ("expert", Role("expert"), {"role": "expert"}, ("expert",)):
        found = find_roles(Small(), {"up.*": value}, sharded=False)
        assert set(found.parameters.values()) == {"expert"}
        assert all(name.startswith("up.") for name in found.expert_parameters)
    assert find_roles(Small(), sharded=False).parameters == {}
    with rejects("roles", ..., "missing", where="Small"):
        find_roles(Small())
    with rejects("up.*", "sideways", "unknown"):
        find_roles(Small(), {"up.*": "sideways"}, sharded=False)
