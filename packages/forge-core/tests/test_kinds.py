"""What each parameter is, as an explicit table, and what follows from it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from forge_core import Transformer, TransformerConfig, flops_per_token, optim
from forge_core.kinds import parameter_kinds
from forge_core.lora import LoRAConfig, lora
from forge_core.model.config import MLAConfig, MTPConfig, MuPConfig
from forge_core.optim.build import changes_of_older_run
from forge_core.optim.groups import lr_scales
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

SMALL: dict[str, Any] = {"vocab_size": 16, "dim": 8, "num_layers": 1, "num_heads": 2}
BLOCK = {
    "layers.0.mixer_norm.weight": "norm",
    "layers.0.mixer.q_proj.weight": "matrix",
    "layers.0.mixer.k_proj.weight": "matrix",
    "layers.0.mixer.v_proj.weight": "matrix",
    "layers.0.mixer.o_proj.weight": "matrix",
    "layers.0.feed_forward_norm.weight": "norm",
    "layers.0.feed_forward.gate_proj.weight": "matrix",
    "layers.0.feed_forward.up_proj.weight": "matrix",
    "layers.0.feed_forward.down_proj.weight": "matrix",
}
ENDS = {"embedding.weight": "embedding", "norm.weight": "norm", "lm_head.weight": "matrix"}
FEED_FORWARD = {n: k for n, k in BLOCK.items() if "feed_forward" in n or "mixer_norm" in n}
TABLES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "dense": ({}, BLOCK | ENDS),
    "tied": ({"tie_embeddings": True}, BLOCK | {n: ENDS[n] for n in ("embedding.weight", "norm.weight")}),
    "biases, norms of queries and keys, layer norm": (
        {"norm": "layer_norm", "qkv_bias": True, "o_bias": True, "qk_norm": True, "feed_forward": "gelu", "feed_forward_bias": True},
        {n: k for n, k in BLOCK.items() if "gate_proj" not in n} | ENDS
        | {f"layers.0.mixer.{n}_proj.bias": "bias" for n in "qkvo"}
        | {f"layers.0.mixer.{n}_norm.weight": "norm" for n in "qk"}
        | {f"layers.0.feed_forward.{n}_proj.bias": "bias" for n in ("up", "down")}
        | {f"layers.0.{n}_norm.bias": "bias" for n in ("mixer", "feed_forward")} | {"norm.bias": "bias"},
    ),
    "mla": (
        {"mixer": "mla", "mla": MLAConfig(q_lora_rank=4, kv_lora_rank=4, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4)},
        FEED_FORWARD | ENDS
        | {f"layers.0.mixer.{n}_proj.weight": "matrix" for n in ("q_a", "q_b", "kv_a", "kv_b", "o")}
        | {f"layers.0.mixer.{n}_norm.weight": "norm" for n in ("q_a", "kv_a")},
    ),
    "mtp": (
        {"mtp": MTPConfig(num_modules=1)},
        BLOCK | ENDS | {n.replace("layers.0", "mtp.0.block"): k for n, k in BLOCK.items()}
        | {"mtp.0.join.weight": "matrix"} | {f"mtp.0.{n}norm.weight": "norm" for n in ("stream_", "token_", "")},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_F146_kinds_of_a_decoder(name: str) -> None:
    options, table = TABLES[name]
    with torch.device("meta"):
        model = Transformer(TransformerConfig(**{**SMALL, **options}))
    assert parameter_kinds(model) == table
    hidden = {n for n, k in table.items() if k == "matrix" and n.startswith(("layers.", "mtp."))}
    assert optim.hidden_matrices(model, optim.OptimizerConfig("muon")) == hidden


class Stacks(nn.Module):
    """A block of stacks: of matrices, of their biases, and of norms of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.ones(3, 4, 2))
        self.up_bias = nn.Parameter(torch.ones(3, 2))
        self.scales = nn.Parameter(torch.ones(2, 4))

    def parameter_kinds(self) -> dict[str, Any]:
        return {"scales": "stacked_norm"}


class Foreign(nn.Module):
    """Modules of torch and of other libraries, which declare nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(4, 4)
        self.layers = nn.ModuleList([Stacks()])
        self.conv = nn.Conv1d(2, 2, 3)
        self.heads = nn.LayerNorm((2, 4))
        self.theirs = TheirRMSNorm()
        self.head = nn.Linear(4, 4)
        self.head.weight = self.tokens.weight
        self.gate = nn.Parameter(torch.ones(()))


class TheirRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 4))


KINDS = {
    "gate": "vector",
    "tokens.weight": "embedding",
    "layers.0.up": "stacked_matrix",
    "layers.0.up_bias": "stacked_bias",
    "layers.0.scales": "stacked_norm",
    "conv.weight": "tensor",
    "conv.bias": "bias",
    "heads.weight": "stacked_norm",
    "heads.bias": "stacked_bias",
    "theirs.weight": "stacked_norm",
    "head.bias": "bias",
}
DECAYED = {"tokens.weight", "layers.0.up", "conv.weight"}


def test_F146_kinds_of_modules_that_declare_nothing() -> None:
    model = Foreign()
    assert parameter_kinds(model) == KINDS
    head_first = nn.ModuleDict({"head": model.head, "tokens": model.tokens})
    assert parameter_kinds(head_first) == {"head.weight": "embedding", "head.bias": "bias"}
    lora(layer := nn.Sequential(nn.Linear(4, 4)), LoRAConfig(("0",), rank=2))
    wanted = {"weight": "matrix", "bias": "bias", "lora_a": "matrix", "lora_b": "matrix"}
    assert parameter_kinds(layer) == {f"0.{n}": k for n, k in wanted.items()}


@pytest.mark.parametrize(
    "name", ["adamw", "lion", "muon", "schedule_free_adamw", "torch.optim:AdamW"]
)
def test_F146_stacks_of_vectors_do_not_decay(name: str) -> None:
    model = Foreign()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0).grad = torch.zeros_like(parameter)
    optim.build_optimizer(model, optim.OptimizerConfig(name, lr=1.0, weight_decay=0.1)).step()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, torch.ones_like(p))}
    assert moved == DECAYED


def test_F146_muon_takes_no_stack_of_vectors() -> None:
    assert optim.hidden_matrices(Foreign(), optim.OptimizerConfig("muon")) == {"layers.0.up"}


@pytest.mark.parametrize(
    ("declared", "key", "value", "code"),
    [
        ({"scales": "scale"}, "layers.0.scales", "scale", "unknown"),
        ({"up": "matrix"}, "layers.0.up", "matrix", "dims"),
        ({"scale": "norm"}, "layers.0.scale", ..., "not_found"),
    ],
)
def test_F146_a_declaration_that_does_not_fit_is_rejected(
    declared: Any, key: str, value: Any, code: str
) -> None:
    model = Foreign()
    model.layers[0].parameter_kinds = lambda: declared
    with rejects(key, value, code):
        optim.build_optimizer(model)


def as_before(name: str) -> tuple[Foreign, Any]:
    """A model and its optimizer after two steps, by the rule of versions before: what has two dims decays."""
    model = Foreign()
    optimizer = optim.build_optimizer(model, optim.OptimizerConfig(name, weight_decay=0.3))
    names = {p: n for g in optimizer.param_groups for n, p in zip(g["param_names"], g["params"])}
    for group in optimizer.param_groups:
        if not group["weight_decay"] or not group.get("muon", True):
            stacks = [p for p in group["params"] if p.ndim > 1 and names[p] not in DECAYED]
            group["params"] = [p for p in group["params"] if p not in set(stacks)]
            target = optimizer.param_groups[0]
            target["params"] = [*target["params"], *stacks]
    order = list(model.parameters())
    for group in optimizer.param_groups:
        group["params"].sort(key=lambda p: next(i for i, own in enumerate(order) if own is p))
        group["param_names"] = [names[p] for p in group["params"]]
    step(model, optimizer, 2)
    return model, optimizer


def step(model: nn.Module, optimizer: Any, steps: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("name", ["adamw", "lion", "torch.optim:AdamW"])
def test_F146_state_of_a_version_before_loads_in_the_form_of_torch(name: str) -> None:
    old, saved = as_before(name)
    model = Foreign()
    model.load_state_dict(old.state_dict())
    optimizer = optim.build_optimizer(model, optim.OptimizerConfig(name, weight_decay=0.3))
    optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
    decays = {n: g["weight_decay"] for g in optimizer.param_groups for n in g["param_names"]}
    assert {n for n, decay in decays.items() if decay} == DECAYED
    theirs = dict(old.named_parameters())
    for own_name, parameter in model.named_parameters():
        for slot, value in saved.state[theirs[own_name]].items():
            assert torch.equal(optimizer.state[parameter][slot], value), (own_name, slot)
    step(model, optimizer, 1)


def test_F146_state_of_a_norm_that_muon_trained_is_reset() -> None:
    fresh = optim.build_optimizer(Foreign(), optim.OptimizerConfig("muon"))
    old = fresh.named_state()
    old["layers.0.scales"] = {"momentum_buffer": torch.full((2, 4), 7.0)}
    old["layers.0.up"] = {"momentum_buffer": torch.full((3, 4, 2), 5.0)}
    model = Foreign()
    optimizer = optim.build_optimizer(model, optim.OptimizerConfig("muon"))
    step(model, optimizer, 1)
    optimizer.load_named_state(old)
    state = optimizer.named_state()
    assert float(state["layers.0.scales"]["exp_avg_sq"].abs().sum()) == 0.0
    assert state["layers.0.scales"]["step"] == 0.0
    assert torch.equal(state["layers.0.up"]["momentum_buffer"], torch.full((3, 4, 2), 5.0))
    old["tokens.weight"] = {"momentum_buffer": torch.zeros(4, 4)}  # a change of the configuration
    with rejects("tokens.weight.exp_avg", ..., "missing"):
        optimizer.load_named_state(old)


def test_F146_a_width_scales_rates_of_matrices_and_not_of_stacked_biases() -> None:
    model = Transformer(
        TransformerConfig(**SMALL, parametrization="mup", mup=MuPConfig(base_dim=4))
    )
    model.layers["0"].feed_forward = Stacks()
    scales = lr_scales(model, optim.OptimizerConfig())
    found = {n.rpartition(".")[2]: s for n, s in scales.items() if ".feed_forward." in n}
    assert found == {"up": 0.5, "up_bias": 1.0, "scales": 1.0}


def test_F146_frozen_stacks_of_vectors_spare_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Stacks())
    trained = flops_per_token(model, 1)
    model[1].requires_grad_(False)
    assert flops_per_token(model, 1) == trained


OLDER = ["layers.0.scales", "layers.0.up_bias", "heads.bias", "heads.weight", "theirs.weight"]


@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
def test_F146_changes_of_an_older_run_are_named(name: str) -> None:
    """By the rules of versions before: what has two dims decays, and Muon trains it in a block unless it ends in bias."""
    model = Foreign()
    lines = changes_of_older_run(model, optim.OptimizerConfig(name, weight_decay=0.3))
    patterns = {n.replace(".0.", ".*.") for n in OLDER}
    decay, *muon = [{*line.partition(" had ")[0].partition(" were ")[0].split(", ")} for line in lines]  # fmt: skip
    assert decay == patterns
    assert muon == ([{"layers.*.scales"}] if name == "muon" else [])

    # as the line tells, a group keeps the decay
    kept = {"stacks": optim.OptimizerGroupConfig(tuple(patterns), weight_decay=0.3)}
    config = optim.OptimizerConfig(name, weight_decay=0.3, groups=kept)
    before, _ = as_before("adamw")
    groups = optim.param_groups(model, config)
    decays = {n for group in groups if group["weight_decay"] for n, _ in group["params"]}
    assert decays == {n for n, p in before.named_parameters() if p.ndim > 1}
    assert len(changes_of_older_run(model, config)) == len(muon)
    assert changes_of_older_run(model, optim.OptimizerConfig(name, weight_decay=0.0)) == lines[1:]
    assert not changes_of_older_run(nn.Linear(4, 4), optim.OptimizerConfig("adamw"))


def test_F146_another_rate_of_stacked_biases_is_named() -> None:
    model = Transformer(
        TransformerConfig(**SMALL, parametrization="mup", mup=MuPConfig(base_dim=4))
    )
    model.layers["0"].feed_forward = Stacks()
    (line,) = changes_of_older_run(model, optim.OptimizerConfig(weight_decay=0.0))
    assert line.startswith("layers.*.feed_forward.scales, layers.*.feed_forward.up_bias ")
