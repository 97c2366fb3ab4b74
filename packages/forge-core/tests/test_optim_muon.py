"""Muon against float64 by hand and torch.optim.Muon, on one process; which parameters are its; mask and state."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import pytest
import torch
from optim_nets import assert_resumes, assert_same_weights, error, recorded, run
from torch import Tensor, nn

from forge_core.optim import (
    AdamW,
    Muon,
    MuonConfig,
    OptimizerConfig,
    OptimizerGroupConfig,
    build_optimizer,
    check_optimizer,
    groups,
    hidden_matrices,
)
from forge_core.optim import muon as muon_module
from forge_core.optim.build import changes_of_older_run
from forge_core.optim.muon import orthogonalize
from forge_testing.problems import assert_problem, rejects

pytestmark = pytest.mark.lane("test")

Gradients = list[dict[str, Tensor]]
NS = (3.4445, -4.7750, 2.0315)


class Model(nn.Module):
    """Blocks with a wide, a tall, a square matrix and a stack of experts between an embedding and a head."""

    def __init__(self, experts: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(self.block(experts) for _ in range(2))
        self.head = nn.Linear(8, 12)

    def block(self, experts: bool) -> nn.Module:
        block = nn.ModuleDict(
            {
                "up": nn.Linear(8, 20),
                "down": nn.Linear(20, 8),
                "mix": nn.Linear(8, 8, bias=False),
                "norm": nn.LayerNorm(8),
            }
        )
        if experts:
            block.experts = nn.Parameter(torch.randn(3, 8, 6))  # (E, in, out)
            block.experts_bias = nn.Parameter(torch.randn(3, 6))  # vectors
        return block


HIDDEN = {f"layers.{i}.{n}" for i in (0, 1) for n in ("up.weight", "down.weight", "mix.weight", "experts")}  # fmt: skip


def newton_schulz(matrix: Tensor, steps: int) -> Tensor:
    """Keller Jordan's iteration, of one matrix."""
    a, b, c = NS
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix) / (matrix.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def by_hand(weight: Tensor, gradients: list[Tensor], lr: float, decay: float, c: MuonConfig) -> Tensor:  # fmt: skip
    """One matrix (out, in) in float64, with the momentum of Keller's statement: B <- mu B + G."""
    w, b = weight.double(), torch.zeros(weight.shape, dtype=torch.float64)
    out, into = weight.shape
    for g in gradients:
        b = c.momentum * b + g.double()
        direction = g.double() + c.momentum * b if c.nesterov else b
        size = max(1, out / into) ** 0.5 if c.adjust == "original" else 0.2 * max(out, into) ** 0.5
        w = w - lr * decay * w - lr * size * newton_schulz(direction, c.ns_steps)
    return w


@pytest.mark.parametrize(
    "own",
    [
        MuonConfig(ns_dtype="fp32"),
        MuonConfig(ns_dtype="fp32", adjust="original", nesterov=False, momentum=0.9, ns_steps=4),
    ],
)
def test_six_steps_equal_float64(own: MuonConfig) -> None:
    model = Model()
    config = OptimizerConfig("muon", lr=0.02, weight_decay=0.3, muon=own)
    gradients = recorded(model, 6)
    wanted = {}
    for name, parameter in model.named_parameters():
        start, steps = parameter.detach().clone(), [step[name] for step in gradients]
        if parameter.ndim == 3:  # each expert is a matrix (in, out)
            wanted[name] = torch.stack(
                [
                    by_hand(start[e].T, [g[e].T for g in steps], 0.02, 0.3, own).T
                    for e in range(len(start))
                ]
            )
        elif name in HIDDEN:
            wanted[name] = by_hand(start, steps, 0.02, 0.3, own)
    assert wanted.keys() == HIDDEN
    run(model, build_optimizer(model, config), gradients)
    got = dict(model.named_parameters())
    errors = {name: error(got[name].detach(), wanted[name]) for name in wanted}
    # fp32 iterations enlarge rounding by up to 3.4^5; the update is a twentieth of a weight
    assert max(errors.values()) <= 1e-6, errors


def test_the_rest_is_adamw_with_a_rate_of_its_own() -> None:
    model, twin = Model(), Model()
    own = MuonConfig(adamw_lr_multiplier=0.5)
    config = OptimizerConfig("muon", lr=0.02, betas=(0.8, 0.9), eps=1e-4, muon=own)
    optimizer = build_optimizer(model, config)
    plain = build_optimizer(twin, OptimizerConfig(lr=0.01, betas=(0.8, 0.9), eps=1e-4))
    gradients = recorded(model, 3)
    run(model, optimizer, gradients)
    run(twin, plain, gradients)
    others = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, others[name]) == (name not in HIDDEN), name
    state = optimizer.named_state()
    assert {name for name, slots in state.items() if set(slots) == {"momentum_buffer"}} == HIDDEN
    assert state["embedding.weight"]["step"] == 3.0


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_bf16_is_torchs_muon(adjust: Any) -> None:
    """Of the update. The same operations, so 1e-6 on this CPU; products of a batch may be rounded otherwise, by 2^-9."""
    model, twin = Model(experts=False), Model(experts=False)
    config = OptimizerConfig("muon", lr=0.02, weight_decay=0.3, muon=MuonConfig(adjust=adjust))
    gradients = recorded(model, 4)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    run(model, build_optimizer(model, config), gradients)
    hidden = {n: p for n, p in twin.named_parameters() if n in HIDDEN}
    reference = torch.optim.Muon(
        list(hidden.values()), lr=0.02, weight_decay=0.3, adjust_lr_fn=adjust
    )
    run(twin, reference, gradients)
    for name, parameter in model.named_parameters():
        if name in HIDDEN:
            moved = hidden[name].detach() - before[name]
            assert error(parameter.detach() - before[name], moved) <= 1e-2, name


def test_it_orthogonalizes() -> None:
    """Singular values of an update are near one, whatever those of the gradient."""
    model = nn.Sequential(nn.Linear(8, 32, bias=False))
    own = MuonConfig(adjust="original", ns_dtype="fp32")
    optimizer = build_optimizer(model, OptimizerConfig("muon", lr=1.0, weight_decay=0.0, muon=own))
    before = model[0].weight.detach().clone()
    model[0].weight.grad = torch.randn(32, 8) @ torch.diag(torch.logspace(0, -1, 8))
    optimizer.step()
    values = torch.linalg.svdvals((model[0].weight.detach() - before) / 2)  # sqrt(32 / 8)
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_a_masked_step_changes_nothing_and_an_unmasked_one_is_bit_equal() -> None:
    model, twin = Model(), Model()
    config = OptimizerConfig("muon", lr=0.1, weight_decay=0.5)
    masked, plain = build_optimizer(model, config), build_optimizer(twin, config)
    for step in recorded(model, 3):
        run(model, masked, [step], skip=torch.tensor(0.0))
        bad = {n: torch.full_like(g, math.nan) for n, g in step.items()}
        run(model, masked, [bad], skip=torch.tensor(1.0))
        run(twin, plain, [step])
    assert_same_weights(model, twin)
    _assert_same_state(masked, plain)


def test_F32_after_a_load_the_steps_are_bit_equal() -> None:
    straight, resumed = Model(), Model()
    gradients, config = recorded(straight, 6), OptimizerConfig("muon")
    optimizer, other = build_optimizer(straight, config), build_optimizer(resumed, config)
    run(straight, optimizer, gradients[:3])
    run(resumed, other, recorded(straight, 2, seed=9))
    assert_resumes(straight, optimizer, resumed, other, gradients[3:])
    _assert_same_state(optimizer, other)


def test_state_in_the_form_of_torch_and_copies() -> None:
    model, config = Model(), OptimizerConfig("muon", muon=MuonConfig(adamw_lr_multiplier=0.1))
    optimizer = build_optimizer(model, config)
    run(model, optimizer, recorded(model, 2))
    twin, copied = build_optimizer(model, config), copy.deepcopy(optimizer)
    twin.load_state_dict(optimizer.state_dict())
    _assert_same_state(twin, optimizer)
    _assert_same_state(copied, optimizer)
    for group in copied.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    copied.step()


def test_F33_embedding_and_head_are_not_orthogonalized_and_groups_decide_otherwise() -> None:
    def muons(**groups: Any) -> set[str]:
        config = OptimizerConfig("muon", groups={n: OptimizerGroupConfig(*g[:1], muon=g[1]) for n, g in groups.items()})  # fmt: skip
        optimizer = build_optimizer(Model(), config)
        return {n for g in optimizer.param_groups if g["muon"] for n in g["param_names"]}

    assert muons() == HIDDEN
    assert muons(a=(("layers.1.*",), False)) == {n for n in HIDDEN if n.startswith("layers.0")}
    assert muons(a=(("head.*",), True)) == HIDDEN | {"head.weight"}  # its bias is no matrix


def test_F218_matrices_of_cross_attention_blocks_are_hidden_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Versions before gave them to AdamW; a run of one goes on, with new moments and a line that says so."""
    model = Model()
    model.layers = nn.ModuleDict({"0": model.layers[0], "cross_1": model.layers[1]})
    hidden = {n.replace("layers.1", "layers.cross_1") for n in HIDDEN}
    config = OptimizerConfig("muon")
    assert hidden_matrices(model, config) == hidden
    assert "layers.cross_*.up.weight" in changes_of_older_run(model, config)[-1]

    with monkeypatch.context() as before:
        before.setattr(groups, "_BLOCK", re.compile(r"(^|\.)\d+\."))
        older = build_optimizer(model, config)
        assert hidden_matrices(model, config) == {n for n in HIDDEN if ".0." in n}
    gradients = recorded(model, 2)
    run(model, older, gradients)
    newer = build_optimizer(model, config)
    newer.load_named_state(older.named_state())
    run(model, newer, gradients)
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_table_of_ids_in_a_block_and_a_tied_one_are_adamws() -> None:
    model = Model()
    model.layers[0].ids = nn.Embedding(5, 8)
    model.layers[0].mix.weight = model.embedding.weight
    optimizer = build_optimizer(model, OptimizerConfig("muon"))
    names = {n for g in optimizer.param_groups if not g["muon"] for n in g["param_names"]}
    assert {"embedding.weight", "layers.0.ids.weight"} <= names


def test_a_parameter_without_gradient_does_not_change() -> None:
    model = Model()
    optimizer = build_optimizer(model, OptimizerConfig("muon", lr=0.1, weight_decay=0.5))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    model.layers[0].mix.weight.grad = torch.ones(8, 8)
    optimizer.step()
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {"layers.0.mix.weight"}


@pytest.mark.parametrize("steps", [0, 100, 2.5, True, "5"])
def test_ns_steps_are_an_integer(steps: Any) -> None:
    with rejects("ns_steps", steps, "range", where="muon: "):
        MuonConfig(ns_steps=steps)


def test_impossible_arguments_are_rejected() -> None:
    with rejects("optimizer.name", "muon", "no_matrix"):
        build_optimizer(nn.Linear(3, 3), OptimizerConfig("muon"))
    with rejects("optimizer.name", "muon", "no_matrix"):
        check_optimizer(nn.Linear(1, 1, device="meta"), OptimizerConfig("muon"))
    group = {"a": OptimizerGroupConfig(("*",), muon=True)}
    check_optimizer(nn.Linear(1, 1, device="meta"), OptimizerConfig("muon", groups=group))
    given = {"momentum": 1.0, "ns_steps": 0, "ns_dtype": "fp16", "adjust": "mine"}
    with rejects("momentum", 1.0, "range", where="muon: ") as error:
        MuonConfig(**given, adamw_lr_multiplier=0)
    assert_problem(error.value, "ns_dtype", "fp16", "unknown")
    assert_problem(error.value, "adjust", "mine", "unknown")
    assert_problem(error.value, "adamw_lr_multiplier", 0, "range")
    assert len(error.value.problems) == 5
    group = {"a": OptimizerGroupConfig(("*",), muon=True)}
    with rejects("muon.ns_steps", 3, "foreign", where="optimizer: ") as error:
        OptimizerConfig(muon=MuonConfig(ns_steps=3), groups=group)
    assert_problem(error.value, "groups.a.muon", True, "foreign")
    assert isinstance(build_optimizer(Model(), OptimizerConfig("muon")), Muon)
    assert not isinstance(build_optimizer(Model()), Muon)
    assert issubclass(Muon, AdamW)


def _assert_same_state(one: Any, other: Any) -> None:
    mine, theirs = one.named_state(), other.named_state()
    assert mine.keys() == theirs.keys()
    for name, slots in theirs.items():
        for slot, value in slots.items():
            assert torch.equal(torch.as_tensor(mine[name][slot]), torch.as_tensor(value)), name


def test_the_kernel_of_a_convolution_is_no_stack_of_matrices() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Conv1d(4, 4, 3), nn.Linear(4, 4)])})
    optimizer = build_optimizer(model, OptimizerConfig("muon"))
    groups = {name: g["muon"] for g in optimizer.param_groups for name in g["param_names"]}
    assert groups["layers.1.weight"]
    assert not groups["layers.0.weight"]


@pytest.mark.parametrize("shape", [(40, 70), (64, 33)])
def test_matmuls_by_blocks_equal_matmuls_of_full_matrices(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muon_module, "_ROWS", 16)  # and a last block of 8 or 1 rows
    monkeypatch.setattr(muon_module, "_BATCH", 2 * shape[0] * shape[1])  # F197: of 3
    matrices = [torch.randn(shape) for _ in range(3)]
    for matrix, got in zip(matrices, orthogonalize(matrices, 5, torch.float32), strict=True):
        assert error(got, newton_schulz(matrix.double(), 5)) <= 1e-5
