"""Maximal-update parametrization: its table, and a coordinate check over widths and depths."""

from __future__ import annotations

import math
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_core import OptimizerConfig, Transformer, TransformerConfig, build_optimizer
from forge_core.families import GRANITE, LLAMA
from forge_core.loss import cross_entropy
from forge_core.model import Attention, AttentionSpec, MTPConfig, MuPConfig, build_feed_forward
from forge_core.model.block import Block, PostNormBlock, SandwichBlock, build_block, build_mixer
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

BLOCKS = {"pre_norm": Block, "post_norm": PostNormBlock, "sandwich": SandwichBlock}

BASE = {"vocab_size": 61, "dim": 32, "num_layers": 2, "num_heads": 2, "hidden_dim": 64}


def _config(width: int = 1, depth: int = 1, **options: Any) -> TransformerConfig:
    """A model `width` times as wide, by more heads of the same width, and `depth` times as deep."""
    sizes = {"dim": 32 * width, "num_heads": 2 * width, "hidden_dim": 64 * width}
    return TransformerConfig(**{**BASE, **sizes, "num_layers": 2 * depth, **options})


MUP: dict[str, Any] = {"parametrization": "mup", "mup": MuPConfig(32, 2)}


def test_at_the_base_it_is_the_standard_parametrization_bit_for_bit() -> None:
    plain, base = Transformer(_config()), Transformer(_config(**MUP))
    tokens = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(0))
    assert all(map(torch.equal, plain.parameters(), base.parameters()))
    for model in (plain, base):
        optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2))
        for _ in range(3):
            cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).mean.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(map(torch.equal, plain.parameters(), base.parameters()))


def test_its_table() -> None:
    """Width 4 and depth 9 times the base; 1 / sqrt(2 L) of residual outputs is that of the base."""
    config = _config(4, 9, **MUP, init_std=0.1)
    model = Transformer(config)
    optimizer = build_optimizer(model, OptimizerConfig(lr=1.0))
    rates = {n: g["lr"] for g in optimizer.param_groups for n in g["param_names"]}
    stds = {name: float(p.detach().std()) for name, p in model.named_parameters()}
    for name, rate, std in (
        ("embedding.weight", 1.0, 0.1),
        ("lm_head.weight", 1.0, 0.1),
        ("norm.weight", 1.0, 0.0),
        ("layers.3.mixer.q_proj.weight", 1 / 12, 0.05),
        ("layers.3.mixer.o_proj.weight", 1 / 12, 0.05 / 2),
        ("layers.3.feed_forward.down_proj.weight", 1 / 12, 0.05 / 2),
        ("layers.3.mixer_norm.weight", 1 / 3, 0.0),
    ):
        assert rates[name] == pytest.approx(rate), name
        assert stds[name] == pytest.approx(std, rel=0.05), name
    assert model.layers["0"].residual_scale == pytest.approx(1 / 3)
    assert model.lm_head.transform.scale == pytest.approx(1 / 4)
    assert model.layers["0"].mixer.spec.scale is None
    wide = _config(4, num_heads=2, parametrization="mup", mup=MuPConfig(32, base_head_dim=16))
    assert Transformer(wide).layers["0"].mixer.spec.scale == pytest.approx(4 / 64)


def test_it_is_the_same_function_in_standard_keys() -> None:
    config = _config(2, 2, **MUP)
    model = Transformer(config)
    same = Transformer(config.as_standard())
    same.load_state_dict(model.state_dict())
    tokens = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(0))
    assert torch.equal(model(tokens), same(tokens))
    assert config.as_standard().parametrization == "standard"


@pytest.mark.lane("quick")
@pytest.mark.parametrize("heads", [{}, {"num_heads": 2, "mup": MuPConfig(32, 2, base_head_dim=16)}])
@pytest.mark.parametrize("block", ["pre_norm", "post_norm", "sandwich"])
def test_custom_parts_may_be_given_the_config_as_it_is(block: str, heads: dict) -> None:
    config = _config(2, 2, **{**MUP, "block": block, **heads})
    parts: list[dict[str, Any]] = [
        {"mixer": lambda i: build_mixer(config, i)},
        {"mixer": lambda i: Attention(config)},
        {"feed_forward": lambda i: build_feed_forward(config, i)},
        {
            "block": lambda i: build_block(
                config, build_mixer(config, i), build_feed_forward(config, i)
            )
        },
        {
            "block": lambda i: BLOCKS[block](
                config, Attention(config), build_feed_forward(config, 0)
            )
        },
    ]
    tokens = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(0))
    wanted = Transformer(config)(tokens)
    for given in parts:
        assert torch.equal(Transformer(config, **given)(tokens), wanted)


def test_a_named_block_is_given_the_standard_config_in_a_factory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[float] = []

    class Noting(Block):
        def __init__(self, config: TransformerConfig, *parts: Any) -> None:
            super().__init__(config, *parts)
            seen.append(config.residual_scale)

    lab = types.ModuleType("example_lab")
    vars(lab)["Noting"] = Noting
    monkeypatch.setitem(sys.modules, "example_lab", lab)
    config = _config(1, 4, block="example_lab:Noting", **MUP)
    build_block(config, Attention(config), build_feed_forward(config, 0))
    assert seen == [0.5]


def test_a_family_writes_the_same_function() -> None:
    config = _config(2, 2, **MUP)
    assert GRANITE.config_to_hf(config) == GRANITE.config_to_hf(config.as_standard())
    assert GRANITE.config_to_hf(config)["residual_multiplier"] == pytest.approx(2**-0.5)
    assert GRANITE.config_to_hf(config)["logits_scaling"] == pytest.approx(2.0)
    with pytest.raises(ValueError, match="residual_scale"):
        LLAMA.config_to_hf(config)


def _changes(config: TransformerConfig, lr: float, steps: int = 4) -> dict[str, float]:
    """RMS of how much stream (before the head) and logits change in a few steps."""
    tokens = torch.randint(61, (8, 17), generator=torch.Generator().manual_seed(1))
    model = Transformer(config)
    optimizer = build_optimizer(model, OptimizerConfig(lr=lr, weight_decay=0.0))
    seen: list[dict[str, Tensor]] = []
    found: dict[str, Tensor] = {}
    model.norm.register_forward_pre_hook(lambda _, args: found.update(stream=args[0].detach()))
    for _ in range(steps + 1):
        found["logits"] = model(tokens[:, :-1])
        seen.append({name: value.detach().clone() for name, value in found.items()})
        cross_entropy(found["logits"], tokens[:, 1:]).mean.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: float((seen[-1][n] - seen[0][n]).square().mean().sqrt()) for n in seen[0]}


def _slope(sizes: list[int], values: list[float]) -> float:
    """Of log(value) over log(size), by least squares."""
    x, y = [math.log(s) for s in sizes], [math.log(v) for v in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    rows = list(zip(x, y))
    top = sum((a - mean_x) * (b - mean_y) for a, b in rows)
    return top / sum((a - mean_x) ** 2 for a, _ in rows)


SIZES = [1, 2, 4, 8]


# Logits of a narrow model also change through the head's initial weights, by 1 / sqrt(width) of the rest.
BOUNDS = {("width", "logits"): 0.25}


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize("axis", ["width", "depth"])
def test_coordinates_change_alike_at_four_widths_and_depths(axis: str) -> None:
    """Slope of log change over log size, after four steps: near 0, and in the standard parametrization 0.3 to 1.1."""
    found = {
        kind: [_changes(_config(**{axis: size}, **options), 1e-3) for size in SIZES]
        for kind, options in (("standard", {}), ("mup", MUP))
    }
    for name in ("stream", "logits"):
        slopes = {k: _slope(SIZES, [row[name] for row in rows]) for k, rows in found.items()}
        assert abs(slopes["mup"]) < BOUNDS.get((axis, name), 0.1), (name, slopes)
        assert slopes["standard"] > 0.3, (name, slopes)


AHEAD: dict[str, Any] = {"mtp": MTPConfig(2)}


def _ahead(model: Transformer, tokens: Tensor) -> Tensor:
    """Logits (3 B, S - 3, V) of the next token and of the two behind it."""
    first, *further = (tokens[:, k : tokens.size(1) - 3 + k] for k in range(3))
    return model(first, next_tokens=torch.stack(further, dim=1))


def test_mtp_modules_at_the_base_and_in_standard_keys() -> None:
    tokens = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(0))
    plain, base = Transformer(_config(**AHEAD)), Transformer(_config(**AHEAD, **MUP))
    assert torch.equal(_ahead(plain, tokens), _ahead(base, tokens))
    rates = {g["lr"] for g in build_optimizer(base, OptimizerConfig(lr=1.0)).param_groups}
    assert rates == {1.0}
    model = Transformer(_config(2, 2, **AHEAD, **MUP))
    same = Transformer(model.config.as_standard())
    same.load_state_dict(model.state_dict())
    assert torch.equal(_ahead(model, tokens), _ahead(same, tokens))


def test_learning_rates_and_initial_values_of_mtp_modules() -> None:
    """The projection's inputs are twice the width; it stands once, so depth has no part in its rate."""
    model = Transformer(_config(4, 9, **AHEAD, **MUP))
    optimizer = build_optimizer(model, OptimizerConfig(lr=1.0))
    rates = {n: g["lr"] for g in optimizer.param_groups for n in g["param_names"]}
    stds = {name: float(p.detach().std()) for name, p in model.named_parameters()}
    base = Transformer(_config(**AHEAD))
    for name, rate, std in (
        ("mtp.0.join.weight", 1 / 4, base.config.init_std / 2),
        ("mtp.1.block.mixer.q_proj.weight", 1 / 12, base.config.init_std / 2),
        ("mtp.1.block.mixer_norm.weight", 1 / 3, 0.0),
        ("mtp.0.stream_norm.weight", 1.0, 0.0),
        ("mtp.0.norm.weight", 1.0, 0.0),
    ):
        assert rates[name] == pytest.approx(rate), name
        assert stds[name] == pytest.approx(std, rel=0.05), name


def _changes_ahead(config: TransformerConfig, lr: float, steps: int = 4) -> dict[str, float]:
    """RMS of how much each module's stream (before the head) and projection change in a few steps."""
    tokens = torch.randint(61, (8, 17), generator=torch.Generator().manual_seed(1))
    model = Transformer(config)
    optimizer = build_optimizer(model, OptimizerConfig(lr=lr, weight_decay=0.0))
    labels = torch.cat([tokens[:, k : 14 + k] for k in (1, 2, 3)])
    now: dict[str, Tensor] = {}
    for key, module in model.mtp.items():
        module.norm.register_forward_pre_hook(
            lambda _, args, key=key: now.update({f"{key}.stream": args[0].detach()})
        )
        module.join.register_forward_hook(
            lambda *call, key=key: now.update({f"{key}.join": call[-1].detach()})
        )
    seen: list[dict[str, Tensor]] = []
    for _ in range(steps + 1):
        logits = _ahead(model, tokens)
        seen.append(dict(now))
        cross_entropy(logits, labels).mean.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: float((seen[-1][n] - seen[0][n]).square().mean().sqrt()) for n in now}


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize("axis", ["width", "depth"])
def test_mtp_streams_change_alike_at_four_widths_and_depths(axis: str) -> None:
    """Slopes over width -0.08 at most, and over depth 0.01; in the standard parametrization 0.75 to 0.86, 0.1 to 0.2."""
    found = {
        kind: [_changes_ahead(_config(**{axis: size}, **AHEAD, **options), 1e-3) for size in SIZES]
        for kind, options in (("standard", {}), ("mup", MUP))
    }
    for name in found["mup"][0]:
        slopes = {k: _slope(SIZES, [row[name] for row in rows]) for k, rows in found.items()}
        assert abs(slopes["mup"]) < 0.1, (name, slopes)
        assert slopes["standard"] > {"width": 0.5, "depth": 0.05}[axis], (name, slopes)


def test_rates_reach_a_model_inside_of_a_wrapper() -> None:
    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Transformer(_config(4, **MUP))

    model = Wrapped()
    rates = {g["lr"] for g in build_optimizer(model, OptimizerConfig(lr=1.0)).param_groups}
    assert rates == {1.0, 0.25}
    with rejects("optimizer.name", "muon", "parametrization"):
        build_optimizer(model, OptimizerConfig("muon"))


def test_other_optimizers_and_mixers_are_rejected() -> None:
    model = Transformer(_config(2, **MUP))
    with rejects("optimizer.name", "torch.optim:SGD", "parametrization"):
        build_optimizer(model, OptimizerConfig("torch.optim:SGD"))
    with rejects("mixer", "mla", "parametrization"):
        TransformerConfig(vocab_size=61, mixer="mla", parametrization="mup")
    with rejects("mup", ..., "foreign"):
        TransformerConfig(vocab_size=61, mup=MuPConfig(64))
    with rejects("base_dim", 0, "range"):
        MuPConfig(0)
    both = {"mup": MuPConfig(base_head_dim=8), "attention": AttentionSpec(scale=0.5)}
    with rejects("attention.scale", 0.5, "excludes"):
        TransformerConfig(vocab_size=61, parametrization="mup", **both)
