"""Weights and moments in bf16: the rounding, by its own laws and in each optimizer."""

from __future__ import annotations

import copy
import hashlib
import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from forge_core.optim import EMAConfig, MuonConfig, OptimizerConfig, build_optimizer, param_groups
from forge_core.optim import ema as ema_module
from forge_core.optim.rounding import RoundedTensors, in_fp32, lists_in_fp32, offset_of, round_by
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

NAMES = ("adamw", "lion", "muon")
STEP = torch.tensor(3.0)


def _stored(values, *, name="w", seed=0, step=0.0, first=0):
    """What bf16 holds of fp32 values after they were written."""
    kept = torch.zeros_like(values, dtype=torch.bfloat16)
    offset = offset_of(kept, name, seed)
    for wide, piece in in_fp32([kept], [values], offset, torch.tensor(step), first):
        wide.copy_(piece)
    return kept


class Small(nn.Module):
    """A block with a matrix, a stack and a vector; a table outside."""

    def __init__(self, dtype=torch.bfloat16, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(11, 6)
        shapes = {"w": (7, 5), "experts": (3, 4, 6), "scale": (9,)}
        self.layers = nn.ModuleList(
            [nn.ParameterDict({n: torch.randn(shape) for n, shape in shapes.items()})]
        )
        self.to(dtype)


def _config(name="adamw", **keys):
    own = {"muon": MuonConfig(ns_dtype="fp32")} if name == "muon" else {}
    return OptimizerConfig(name, **{"lr": 0.01, "weight_decay": 0.1, **own, **keys})


def _give(model, seed, bad=False):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = (gradient * math.nan if bad else gradient).to(parameter.dtype)


def _bits(model, optimizer):
    state = optimizer.named_state()
    found = {n: p.detach().clone() for n, p in model.named_parameters()}
    for name, slots in state.items():
        for slot, value in slots.items():
            found[f"{name}.{slot}"] = copy.deepcopy(value)
    return found


def _assert_same(one, two):
    assert one.keys() == two.keys()
    for name, value in one.items():
        same = (
            torch.equal(value, two[name]) if isinstance(value, torch.Tensor) else value == two[name]
        )
        assert same, name


# ---- the rounding


def test_a_value_between_is_rounded_to_a_neighbor_and_right_in_the_mean():
    low, part = 1.0, 0.3
    value = torch.full((64, 256), low + part * 2**-7)
    found = torch.stack([_stored(value, step=step).float() for step in range(20)])
    assert set(found.unique().tolist()) == {1.0, 1.0 + 2**-7}
    share = ((found - low) * 2**7).mean().item()
    # four standard deviations of a coin over 327,680 throws
    assert share == pytest.approx(part, abs=4 * (part * (1 - part) / found.numel()) ** 0.5)


@pytest.mark.parametrize("what", ["seed", "name", "step", "first"])
def test_the_random_bits_depend_on_each_argument(what):
    value = torch.full((33, 64), 1.0 + 2**-8)
    for other in ({"seed": 1}, {"name": "v"}, {"step": 1.0}, {"first": 1}, {"first": 2}):
        if what in other:
            one, two = _stored(value).float(), _stored(value, **other).float()
            agree = (one == two).float().mean().item()
            assert agree == pytest.approx(0.5, abs=4 * 0.5 / value.numel() ** 0.5)


def test_random_bits_of_neighbors_in_rows_columns_and_steps_are_independent():
    value = torch.full((128, 128), 1.0 + 2**-8)
    sides = [_stored(value, step=float(step)).float().sub(1.0 + 2**-8).sign() for step in (0, 1)]
    (now, later), bound = sides, 4 / value.numel() ** 0.5
    assert abs((now[1:] * now[:-1]).mean().item()) < bound
    assert abs((now[:, 1:] * now[:, :-1]).mean().item()) < bound
    assert abs((now * later).mean().item()) < bound
    assert now.mean(0).abs().max() < 5 / 128**0.5
    assert now.mean(1).abs().max() < 5 / 128**0.5


def test_all_16_bits_are_random():
    """A value a 2^-12th of the way up, or of the way down, is there as often as it should."""
    for part in (2**-12, 1 - 2**-12):
        value = torch.full((1024, 1024), 1.0 + part * 2**-7)
        share = (_stored(value).float().sub(1.0) * 2**7).mean().item()
        assert share == pytest.approx(part, abs=4 * (2**-12 / value.numel()) ** 0.5)


def test_what_bf16_can_hold_stays_as_it_is():
    every = torch.arange(2**16).to(torch.int32)
    values = (every << 16).view(torch.float32).view(256, 256)
    found = _stored(values)
    finite = ~values.isnan()
    assert torch.equal(found.float()[finite], values[finite])
    assert found[~finite].isnan().all()
    assert torch.equal(found.float().signbit()[finite], values.signbit()[finite])


def test_nan_and_infinities_pass_whatever_the_random_bits():
    values = torch.tensor([math.nan, math.inf, -math.inf])
    odd = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    for chance in (0, 1, 0x8000, 0xFFFF, -1):
        draws = torch.full((3,), chance, dtype=torch.int32)
        found = round_by(values, draws)
        assert found[0].isnan()
        assert found[1:].tolist() == [math.inf, -math.inf]
        assert round_by(odd, draws).isnan().all()


def test_fp32_is_written_as_it_is():
    values, offset = torch.randn(5, 3), offset_of(torch.zeros(5, 3), "w", 0)
    kept = torch.zeros(5, 3)
    for wide, piece in in_fp32([kept], [values], offset, STEP):
        wide.copy_(piece)
    assert torch.equal(kept, values)


@pytest.mark.parametrize("shape", [(), (7,), (5, 3), (4, 3, 5), (2, 3, 3, 2), (0, 4), (3, 0)])
def test_rounding_does_not_depend_on_chunks(shape, monkeypatch):
    values = torch.randn(shape)
    whole = _stored(values)
    monkeypatch.setattr("forge_core.optim.rounding.PIECE", {"cpu": 4})
    assert torch.equal(_stored(values), whole)
    strided = torch.empty((*shape, 2), dtype=torch.bfloat16)[..., 0]
    offset = offset_of(strided, "w", 0)
    for wide, piece in in_fp32([strided], [values], offset, torch.tensor(0.0)):
        wide.copy_(piece)
    assert torch.equal(strided, whole)


def _chance(seed, name, step, pair, row, column):
    """32 bits, in Python's own integers."""
    all64, all32 = 2**64 - 1, 2**32 - 1

    def mixed(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & all64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & all64
        return x ^ (x >> 31)

    odd = 0x9E3779B97F4A7C15
    start = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "big")
    key = mixed((step * odd + start) & all64) + pair
    x = (mixed((row * odd + key) & all64) & all32) ^ (column * 0x9E3779B9 & all32)
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & all32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & all32
    return x ^ (x >> 16)


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("shape", [(6,), (3, 5), (2, 3, 5)])
def test_the_random_bits_are_the_documented_function(shape, first):
    """So a resumed run of a later version rounds as before, and any device as this one."""
    value = torch.rand(shape) + 1.0
    found = _stored(value, name="layers.0.w", seed=7, step=5.0, first=first)
    columns = shape[-1] if len(shape) > 1 else 1
    expected = []
    for i, bits in enumerate(value.flatten().view(torch.int32).tolist()):
        draw = _chance(7, "layers.0.w", 5, first // 2, *divmod(i, columns))
        draw = draw >> 16 if first % 2 else draw & 0xFFFF
        expected.append((bits + draw) & ~0xFFFF)
    assert found.float().flatten().view(torch.int32).tolist() == expected


# ---- optimizers


@pytest.mark.parametrize("name", [*NAMES, "schedule_free_adamw"])
def test_moments_in_bf16_are_half_as_large(name):
    model = Small(torch.float32)
    optimizer = build_optimizer(model, _config(name, state_dtype="bf16"))
    points = {"z"}
    for slots in optimizer.named_state().values() if name != "schedule_free_adamw" else ():
        for slot, value in slots.items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == (torch.float32 if slot in points else torch.bfloat16)
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.lane("quick")
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state", ["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_the_first_step_is_that_of_fp32_rounded(name, state, weights):
    model, plain = Small(weights), Small(weights).float()
    optimizer = build_optimizer(model, _config(name, state_dtype=state))
    other = build_optimizer(plain, _config(name))
    _give(model, 1)
    for mine, theirs in zip(model.parameters(), plain.parameters()):
        theirs.grad = mine.grad.float()
    optimizer.step()
    other.step()
    for (at, mine), theirs in zip(model.named_parameters(), plain.parameters()):
        if weights == torch.float32:
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
        else:
            gap = (mine.float() - theirs).abs()
            assert (gap <= theirs.abs() * 2**-7 + 1e-30).all(), at


# Schedule-free weights are rejected in bf16, and with an average.
STORED = [(name, weights) for name in NAMES for weights in (torch.float32, torch.bfloat16)]
STORED += [("schedule_free_adamw", torch.float32)]


@pytest.mark.parametrize(("name", "weights"), STORED)
def test_a_masked_step_changes_no_bit(name, weights):
    model, twin = Small(weights), Small(weights)
    config = _config(name, state_dtype="bf16")
    masked, plain = build_optimizer(model, config), build_optimizer(twin, config)
    for step, bad in enumerate((False, True, False, True)):
        _give(model, step, bad)
        _give(twin, step)
        masked.step(skip=torch.tensor(float(bad)))
        if not bad:
            plain.step()
    for optimizer in (masked, plain):
        if name == "schedule_free_adamw":
            optimizer.eval()
    _assert_same(_bits(model, masked), _bits(twin, plain))


@pytest.mark.lane("quick")
@pytest.mark.parametrize(
    ("name", "weights", "ema"), [*((*s, None) for s in STORED), *((*s, 0.9) for s in STORED[:-1])]
)
def test_a_resumed_run_has_the_same_bits(name, weights, ema):
    config = _config(name, state_dtype="bf16", ema=EMAConfig(ema))
    straight, resumed = Small(weights), Small(weights, seed=5)
    optimizer, other = build_optimizer(straight, config), build_optimizer(resumed, config)
    switches = name == "schedule_free_adamw" or ema
    for step in range(4):
        _give(straight, step)
        optimizer.step()
    for each in (optimizer, other) if switches else ():
        each.eval()
    resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
    other.load_named_state(copy.deepcopy(optimizer.named_state()))
    for each in (optimizer, other) if switches else ():
        each.train()
    for step in range(4, 8):
        for model, own in ((straight, optimizer), (resumed, other)):
            _give(model, step)
            own.step()
    for each in (optimizer, other) if switches else ():
        each.eval()
    _assert_same(_bits(straight, optimizer), _bits(resumed, other))


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_torchs_form_of_state_keeps_dtypes_and_bits(name, weights):
    config = _config(name, state_dtype="fp32" if weights == torch.bfloat16 else "bf16")
    straight, resumed = Small(weights), Small(weights, seed=5)
    optimizer, other = build_optimizer(straight, config), build_optimizer(resumed, config)
    _give(straight, 0)
    optimizer.step()
    resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    _assert_same(_bits(straight, optimizer), _bits(resumed, other))
    for model, own in ((straight, optimizer), (resumed, other)):
        _give(model, 1)
        own.step()
    _assert_same(_bits(straight, optimizer), _bits(resumed, other))


@pytest.mark.parametrize("name", NAMES)
def test_no_two_tensors_of_a_step_are_rounded_by_the_same_random_bits(name, monkeypatch):
    model, seen = Small(), []
    optimizer = build_optimizer(model, _config(name, state_dtype="bf16", ema=EMAConfig(0.9)))

    def spy(values, chance):
        seen.append((chance & 0xFFFF).clone())
        return round_by(values, chance)

    monkeypatch.setattr("forge_core.optim.rounding.round_by", spy)
    _give(model, 0)
    optimizer.step()
    assert len(seen) > 2 * len(list(model.parameters()))
    for n, one in enumerate(seen):
        assert not any(one.shape == two.shape and torch.equal(one, two) for two in seen[:n])


def _steps(name: str, weights: torch.dtype) -> dict[str, torch.Tensor]:
    """Bits after three steps, one of them skipped."""
    model = Small(weights)
    optimizer = build_optimizer(model, _config(name, state_dtype="bf16"))
    for number in range(3):
        _give(model, number)
        optimizer.step(skip=torch.tensor(float(number == 1)))
    return _bits(model, optimizer)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw", "lion"])
@pytest.mark.parametrize("limit", [16, 2**22])
def test_lists_of_chunks_round_like_chunks(name, weights, limit, monkeypatch):
    """As on a GPU, where a list has pieces of several parameters: of one that is split, too."""
    wanted = _steps(name, weights)
    monkeypatch.setattr("forge_core.optim.rounding.PIECE", {})
    monkeypatch.setattr("forge_core.optim.rounding.LARGE_PIECE", limit)
    _assert_same(_steps(name, weights), wanted)


@pytest.mark.parametrize("together", [False, True])
def test_each_parameter_of_a_list_has_its_own_bits(together, monkeypatch):
    shapes = ((4, 6), (4, 6), (10,))
    values = [torch.full(shape, 1 + 2**-9) for shape in shapes]
    offsets = [offset_of(value, f"layers.{n}.w", 3) for n, value in enumerate(values)]
    steps = [torch.tensor(float(n)) for n in range(3)]
    wanted = [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes]
    for stored, *rest in zip(wanted, values, offsets, steps):
        for wide, value in in_fp32([stored], [rest[0]], *rest[1:]):
            wide.copy_(value)
    assert not torch.equal(wanted[0], wanted[1])

    if together:
        monkeypatch.setattr("forge_core.optim.rounding.PIECE", {})
    found = [torch.zeros_like(stored) for stored in wanted]
    rounded = [RoundedTensors([f], [v], o, s) for f, v, o, s in zip(found, values, offsets, steps)]
    numbers = []
    for of_pieces, (wides, parts) in lists_in_fp32(rounded):
        torch._foreach_copy_(wides, parts)
        numbers.append(of_pieces)
    assert numbers == ([[0, 1, 2]] if together else [[0], [1], [2]])
    assert all(map(torch.equal, found, wanted))


_INTERPRETED = """
import torch
from forge_core.optim import rounding, rounding_kernel

torch.manual_seed(0)
for shape in ((), (5,), (40, 70), (3, 7, 2)):
    values = [torch.randn(shape) for _ in range(3)]
    if shape:
        values[0].view(-1)[:3] = torch.tensor([float("nan"), float("inf"), 3.4e38])
    offset = rounding.offset_of(values[0], "layers.0.w", 3)
    rows, columns = offset.rows.flatten(), offset.columns
    key = rounding.mixed(offset.key + 5)
    for numbers in ((0, 1, 2), (1, 2), (1,)):
        found = []
        for round_into in (rounding.round_into, rounding_kernel.round_into):
            stored = [torch.zeros(rows.numel(), columns.numel(), dtype=torch.bfloat16) for _ in numbers]
            flat = [v.reshape(rows.numel(), -1) for v in values]
            round_into(list(zip(numbers, stored, flat)), key, rows, columns)
            found.append(stored)
        for right, kernel in zip(*found):
            assert torch.equal(right.isnan(), kernel.isnan())
            assert torch.equal(right.nan_to_num(), kernel.nan_to_num())
            assert right.count_nonzero()
"""


def test_the_kernel_rounds_by_the_same_bits():
    """Triton's interpreter runs it on a CPU."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", _INTERPRETED], env=environment, check=True)


def test_a_state_of_an_fp32_optimizer_leaves_the_rounding_on():
    plain = build_optimizer(Small(torch.float32), _config("lion"))
    model = Small()
    optimizer = build_optimizer(model, _config("lion"))
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    _give(model, 0)
    optimizer.step()
    assert optimizer.named_state()["layers.0.w"]["step"] == 1.0


def test_the_seed_changes_weights_and_nothing_in_fp32():
    found = []
    for seed in (0, 1):
        for dtype in (torch.bfloat16, torch.float32):
            model = Small(dtype)
            optimizer = build_optimizer(model, _config(), seed=seed)
            _give(model, 0)
            optimizer.step()
            found.append(_bits(model, optimizer)["layers.0.w"])
    assert not torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


# ---- what it is for


def _descend(dtype, name, steps=400):
    """Distance to the goal of weights near 1, whose updates are far below the gap of bf16."""
    model = nn.Module()
    model.w = nn.Parameter(torch.full((32, 32), 1.5, dtype=dtype))
    goal = torch.linspace(1.2, 1.4, 1024).view(32, 32)
    optimizer = build_optimizer(model, OptimizerConfig(name, lr=1e-3, weight_decay=0.0))
    for _ in range(steps):
        model.w.grad = (model.w.detach().float() - goal).to(dtype)
        optimizer.step()
    return (model.w.detach().float() - goal).abs().mean().item()


def _nearest(values, chance):
    return values.to(torch.bfloat16).float()


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_bf16_weights_follow_fp32_where_nearest_rounding_stalls(name, monkeypatch):
    fp32 = _descend(torch.float32, name)
    stochastic = _descend(torch.bfloat16, name)
    monkeypatch.setattr("forge_core.optim.rounding.round_by", _nearest)
    nearest = _descend(torch.bfloat16, name)
    assert nearest == pytest.approx(0.2, abs=0.01)  # it never moved
    assert stochastic < fp32 + 2**-7


def _second_moment(steps, after):
    """Of AdamW with beta2 0.999: gradients of 1, then of `after`; mean of what is
    stored, the exact one, and the relative deviation of the root."""
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(64, 64))
    config = OptimizerConfig(lr=1e-6, betas=(0.9, 0.999), weight_decay=0.0, state_dtype="bf16")
    optimizer, exact = build_optimizer(model, config), 0.0
    for step in range(steps):
        g = 1.0 if step < steps // 2 else after
        model.w.grad = torch.full((64, 64), g)
        optimizer.step()
        exact = 0.999 * exact + 0.001 * g * g
    stored = optimizer.named_state()["w"]["exp_avg_sq"].float()
    spread = (stored.sqrt() / exact**0.5 - 1).square().mean().sqrt().item()
    return stored.mean().item(), exact, spread


@pytest.mark.slow
def test_second_moments_follow_where_nearest_rounding_stalls(monkeypatch):
    stored, exact, spread = _second_moment(1500, 0.1)
    assert stored == pytest.approx(exact, rel=0.005)
    assert spread < 0.04  # of the root, which divides the update
    monkeypatch.setattr("forge_core.optim.rounding.round_by", _nearest)
    stalled, exact, _ = _second_moment(1500, 1.0)
    assert (stalled, exact) == (0.25, pytest.approx(0.777, abs=1e-3))


def _behind(dtype):
    """How far an average is behind weights that move by 1e-3 a step."""
    model = nn.Module()
    model.w = nn.Parameter(torch.full((64, 64), 1.0, dtype=dtype))
    config = OptimizerConfig(lr=1e-3, weight_decay=0.0, ema=EMAConfig(0.99))
    optimizer = build_optimizer(model, config)
    for _ in range(400):
        model.w.grad = torch.full_like(model.w, -1.0)
        optimizer.step()
    trained = model.w.detach().float().mean().item()
    optimizer.eval()
    return trained - model.w.detach().float().mean().item()


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_an_average_in_bf16_follows_the_weights(monkeypatch):
    fp32 = _behind(torch.float32)
    assert _behind(torch.bfloat16) == pytest.approx(fp32, abs=1e-3)
    in_fp32 = ema_module.in_fp32
    monkeypatch.setattr(ema_module, "in_fp32", _to_nearest(in_fp32, monkeypatch))
    assert _behind(torch.bfloat16) > 2 * fp32


def _to_nearest(in_fp32, monkeypatch):
    """`in_fp32` that rounds to nearest."""

    def nearest(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr("forge_core.optim.rounding.round_by", _nearest)
            yield from in_fp32(*arguments)

    return nearest


# ---- what is refused


def test_fp16_weights_are_rejected_by_all():
    for name in NAMES:
        with rejects("embedding.weight", torch.float16, "dtype"):
            build_optimizer(Small(torch.float16), _config(name))


def test_bf16_weights_are_rejected_where_nothing_rounds_them():
    for config in (_config("schedule_free_adamw"), OptimizerConfig("torch.optim:SGD")):
        with rejects("embedding.weight", torch.bfloat16, "dtype"):
            build_optimizer(Small(), config)
    with rejects("embedding.weight", torch.bfloat16, "dtype"):
        param_groups(Small(), _config(), rounds=False)


def test_state_in_bf16_is_rejected_where_nothing_rounds_it():
    with rejects("optimizer.state_dtype", "bf16", "unsupported"):
        build_optimizer(
            Small(torch.float32),
            OptimizerConfig("torch.optim:SGD", weight_decay=0.0, state_dtype="bf16"),
        )
    with rejects("state_dtype", "fp16", "unknown"):
        replace(_config(), state_dtype="fp16")
