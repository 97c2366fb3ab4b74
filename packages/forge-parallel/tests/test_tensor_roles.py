"""Tables of roles: one row for each parameter, and checks that name value, rule and fix."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from forge_parallel.axes.roles import Role, check_cuts, find_roles, match_roles

sys.path.insert(0, str(Path(__file__).parent))
from tensor_models import Model

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


def test_a_row_may_ask_for_multiples():
    for value in ({"role": "colwise", "multiple_of": 2}, Role("colwise", 2), ("colwise", 2)):
        matched = match_roles(Small(), {"up.*": value, "down.*": "rowwise"})
        check_cuts(Small(), matched, 3)
        with pytest.raises(
            ValueError, match=r"up: 3 heads of 2 \(6 outputs\) must be divisible by tp 2"
        ):
            check_cuts(Small(), matched, 2)


REFUSED = {
    "down.weight: no row matches it; add one with a role of colwise": {"up.*": "colwise"},
    "up.weight: must match one row, and 'up.*' and '*.weight' do; make one narrower": {
        "up.*": "colwise",
        "*.weight": "rowwise",
        "down.bias": "rowwise",
    },
    "row 'up.*': role 'columns' is unknown; use colwise": {"up.*": "columns", "down.*": "rowwise"},
    "up: its parameters must have one role, and have 'colwise' and 'rowwise'": {
        "up.weight": "colwise",
        "up.bias": "rowwise",
        "down.*": "rowwise",
    },
    "row 'left.*' matches no parameter; remove or correct it": {
        "*": "sequence",
        "left.*": "rowwise",
    },
    "act: role 'vocab' must have parameters, and it has none": {"*.*": "sequence", "act": "vocab"},
    "an opaque row must name a module below the model": {"*": "opaque"},
    "row 'up.*': {'name': 'colwise'} must have the key role": {"up.*": {"name": "colwise"}},
    "row 'up.*': multiple_of 0 must be at least 1": {"up.*": ("colwise", 0)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_wrong_tables_are_refused(message):
    with pytest.raises(ValueError, match=re.escape(message)):
        match_roles(Small(), REFUSED[message], strict=True)


def test_regions_that_cross_are_refused():
    roles = Model(kinds="r").parallel_roles() | {"layers.0.feed_forward.router.*": "opaque"}
    with pytest.raises(ValueError, match="router: opaque modules cannot stand among experts"):
        match_roles(Model(kinds="r"), roles)
    outer = nn.ModuleDict({"part": Small()})
    outer["part"].scale = nn.Parameter(torch.ones(4))
    roles = {"*.up.*": "colwise", "*.down.*": "rowwise", "part.scale": "opaque"}
    with pytest.raises(
        ValueError, match=r"part: is opaque, and part.up inside has a role; use one"
    ):
        match_roles(outer, roles)


@pytest.mark.parametrize(
    ("module", "role", "message"),
    [
        (nn.Embedding(4, 4), "colwise", "role 'colwise' must be a linear layer, weight (out, in)"),
        (
            nn.LayerNorm(4),
            "norm_over_heads",
            "must be an RMS norm with a weight (D,) that takes the mean of squares from",
        ),
        (
            nn.ParameterDict({"gain": nn.Parameter(torch.ones(6))}),
            "by_heads",
            "part.gain: 6 outputs must be divisible by tp 4",
        ),
        (nn.Linear(4, 4), "vocab", "role 'vocab' must be an nn.Embedding, and it is Linear"),
        (nn.Embedding(4, 4, sparse=True), "vocab", "has no max_norm, scale_grad_by_freq or sparse"),
        (
            nn.Embedding(5, 4),
            "vocab",
            "5 ids must leave none of tp 4 ranks empty; use a smaller tp",
        ),
        (
            nn.Linear(6, 4),
            "rowwise",
            "6 inputs must be divisible by tp 4, no rank may share one; use tp 1",
        ),
    ],
)
def test_what_cannot_be_cut_is_named(module, role, message):
    model = nn.ModuleDict({"part": module})
    with pytest.raises(ValueError, match=re.escape(message)):
        check_cuts(model, match_roles(model, {"part.*": role}), 4)


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
    check_cuts(model, good, 2)
    for other in ("opaque", "rowwise"):
        with pytest.raises(ValueError, match=r"one parameter and must be cut alike"):
            check_cuts(model, match_roles(model, {"embedding.*": "vocab", "head.*": other}), 2)


def test_a_role_has_one_name_however_it_is_written():
    for value in ("expert", Role("expert"), {"role": "expert"}, ("expert",)):
        found = find_roles(Small(), {"up.*": value}, cut=False)
        assert set(found.parameters.values()) == {"expert"}
        assert all(name.startswith("up.") for name in found.expert_parameters)
    assert find_roles(Small(), cut=False).parameters == {}
    with pytest.raises(ValueError, match="Small must say the roles of its parameters"):
        find_roles(Small())
    with pytest.raises(ValueError, match="role 'sideways' is unknown"):
        find_roles(Small(), {"up.*": "sideways"}, cut=False)
