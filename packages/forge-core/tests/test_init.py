"""Initial weights: a function of (seed, name), on any path."""

import hashlib
import math
import subprocess
import sys
from pathlib import Path
from statistics import NormalDist

import pytest
import torch
from torch import nn

from forge_core import Init, Transformer, TransformerConfig, initialize
from forge_core.random_bits import fill_normal
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

CONFIG = TransformerConfig(
    vocab_size=300, dim=64, num_layers=3, num_heads=4, qk_norm=True, qkv_bias=True, o_bias=True
)


def build(**options: object) -> Transformer:
    return Transformer(TransformerConfig(**{**vars(CONFIG), **options}))


def same(a: nn.Module, b: nn.Module) -> bool:
    left, right = dict(a.named_parameters()), dict(b.named_parameters())
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


@pytest.mark.parametrize("options", [{}, {"tie_embeddings": True}, {"norm": "layer_norm"}])
def test_F01_every_parameter_is_initialized_from_poisoned_storage(options: dict) -> None:
    plain = build(**options)
    initialize(plain, 7)
    with torch.device("meta"):
        model = build(**options)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    initialize(model, 7)
    assert same(plain, model)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    assert torch.equal(model(tokens), plain(tokens))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    assert loss.isfinite()


def test_constructor_initializes_with_seed_zero() -> None:
    model, other = build(), build()
    initialize(other, 0)
    assert same(model, other)
    initialize(other, 1)
    assert not same(model, other)


def test_statistics() -> None:
    model = build(init_std=0.05)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert (parameter == 1).all(), name
        elif name.endswith("bias"):
            assert (parameter == 0).all(), name
        else:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = 0.05 / math.sqrt(6) if residual else 0.05
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(parameter.mean().item()) < 0.1 * std, name


def test_a_parameter_depends_only_on_its_name() -> None:
    """Neither depth, nor other parameters, nor the default dtype or device of the caller enter."""
    deep, shallow = build(num_layers=3, tie_embeddings=True), build(num_layers=2)
    assert torch.equal(
        deep.layers["1"].mixer.q_proj.weight, shallow.layers["1"].mixer.q_proj.weight
    )
    assert not torch.equal(
        deep.layers["0"].mixer.q_proj.weight, deep.layers["1"].mixer.q_proj.weight
    )
    low = build(num_layers=2).to(torch.bfloat16)
    initialize(low, 0)
    assert torch.equal(low.lm_head.weight, shallow.lm_head.weight.bfloat16())


def test_other_models_give_a_table_of_plain_data() -> None:
    class Stranger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.Parameter(torch.full((4, 8, 8), torch.nan))
            self.register_buffer("bias", torch.full((4,), torch.nan))
            self.inner = nn.Linear(8, 8)

        def init_table(self, std: float, residual_std: float) -> dict[str, tuple[str, float]]:
            return {"experts": ("normal", residual_std), "bias": ("constant", 0.5)}

    model = nn.Sequential(Stranger(), nn.LayerNorm(8))
    initialize(model, 0, std=0.5, residual_std=0.1)
    stranger = model[0]
    assert stranger.experts.std().item() == pytest.approx(0.1, rel=0.2)
    assert (stranger.bias == 0.5).all()
    assert stranger.inner.weight.std().item() == pytest.approx(0.5, rel=0.2)
    assert not stranger.inner.bias.any()


def test_errors_name_the_parameter() -> None:
    model = nn.Module()
    model.block = nn.Module()
    model.block.scale = nn.Parameter(torch.ones(2))
    with rejects("block.scale", ..., "missing"):
        initialize(model, 0)
    initialize(model, 0, strict=False)
    assert (model.block.scale == 1).all()
    model.block.init_table = lambda std, residual_std: {"sclae": Init("constant", 1.0)}
    with rejects("block.sclae", ..., "not_found"):
        initialize(model, 0)
    model.block.init_table = lambda std, residual_std: {"scale": ("uniform", 1.0)}
    with rejects("block.scale", "uniform", "unknown"):
        initialize(model, 0)
    model.block.init_table = lambda std, residual_std: {"scale": ("normal", math.inf)}
    with rejects("block.scale", math.inf, "finite"):
        initialize(model, 0)
    with torch.device("meta"):
        meta = build()
    with rejects("embedding.weight", ..., "meta"):
        initialize(meta, 0)


def test_a_submodule_is_filled_as_in_the_full_model() -> None:
    """A table at the root names what another part has; a name that nobody has is still a mistake."""
    parts = {"before": nn.Linear(8, 8), "behind": nn.Linear(8, 8)}
    whole = nn.ModuleDict(parts)
    rows = {f"{name}.weight": ("normal", 0.5) for name in parts}
    whole.init_table = lambda std, residual_std: rows
    initialize(whole, 0)
    wanted = whole.behind.weight.clone()
    names = {name for name, _ in whole.named_parameters()}
    del whole["before"]
    with rejects("before.weight", ..., "not_found"):
        initialize(whole, 0)
    initialize(whole, 0, whole=names)
    assert torch.equal(whole.behind.weight, wanted)
    with rejects("before.weight", ..., "not_found"):
        initialize(whole, 0, whole=names - {"before.weight"})


def exact(seed: int, name: str, row: int, column: int) -> float:
    """The normal number of an element, with Python's integers and the exact quantile."""
    odd, bits = 0x9E3779B97F4A7C15, 2**64 - 1

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & bits
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & bits
        return x ^ (x >> 31)

    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "big")
    x = mix(mix(row * odd + key & bits) + column * odd & bits)
    tail = ((x & (1 << 52) - 1) + 0.5) * 2.0**-52
    return -NormalDist().inv_cdf(tail / 2) * (-1 if x >> 63 else 1)


@pytest.mark.parametrize("shape", [(), (7,), (5, 9), (3, 4, 6)])
def test_normal_numbers_are_quantiles_of_a_hash(shape: tuple[int, ...]) -> None:
    values = torch.full(shape, torch.nan, dtype=torch.float64)
    fill_normal(values, 2.0, "a.weight", 5)
    *lead, columns = shape if len(shape) > 1 else (*shape, 1)
    wanted = [
        2 * exact(5, "a.weight", r, c) for r in range(math.prod(lead)) for c in range(columns)
    ]
    assert values.flatten().tolist() == pytest.approx(wanted, rel=1e-6, abs=1e-7)


def test_normal_numbers_are_independent_and_reach_into_the_tails() -> None:
    values = torch.empty(2048, 1024)
    fill_normal(values, 1.0, "w", 0)
    x = values.double()
    count = x.numel()
    fractions = torch.special.ndtr(x.flatten().sort().values)
    distance = (fractions - (torch.arange(count) + 0.5) / count).abs().max()
    assert distance * count**0.5 < 1.95  # Kolmogorov and Smirnov, one of 1,000 samples
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((x**power).mean() - moment) < 4 * (variance / count) ** 0.5
    for a, b in ((x[1:], x[:-1]), (x[:, 1:], x[:, :-1]), (x[1:, 1:], x[:-1, :-1]), (x[2:], x[:-2])):
        assert abs((a * b).mean()) < 4 / count**0.5
        assert abs((a.square() * b.square()).mean() - 1) < 4 * (8 / count) ** 0.5
    beyond = int((x.abs() > 4).sum())
    assert abs(beyond - count * 6.334e-5) < 4 * (count * 6.334e-5) ** 0.5


SHARDS = """
import sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from forge_core import Transformer, TransformerConfig, initialize

config = TransformerConfig(vocab_size=30, dim=16, num_layers=2, num_heads=2, num_kv_heads=1)
plain = Transformer(config)
initialize(plain, 5)
want = dict(plain.named_parameters())
rank = int(sys.argv[1])
dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)  # sends nothing
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
with torch.device("meta"):
    model = Transformer(config)
for block in model.blocks():
    fully_shard(block, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])
head = model.lm_head
model.to_empty(device="cpu")
for p in model.parameters():
    p.to_local().detach().fill_(float("nan"))
import torch.distributed.tensor as dtensor
real, cut = dtensor.distribute_tensor, []
def spy(full, *args, **kwargs):  # F122: indices of a dim go to the device, no whole parameter
    cut.append((full.dtype, full.numel()))
    return real(full, *args, **kwargs)
dtensor.distribute_tensor = spy
initialize(model, 5)
dtensor.distribute_tensor = real
assert set(cut) == {(torch.int64, n) for n in (8, 16, 30, 64)}, set(cut)
dp = mesh["dp"].get_local_rank()
for name, p in model.named_parameters():
    piece = want[name].chunk(2)[dp]
    assert torch.equal(p.to_local(), piece), name

class Holder(torch.nn.Module):
    def __init__(self, placements):
        super().__init__()
        empty = torch.full((6, 8), float("nan"))
        self.weight = torch.nn.Parameter(
            distribute_tensor(empty, mesh, placements, src_data_rank=None)
        )
    def init_table(self, std, residual_std):
        return {"weight": ("normal", std)}

class Plain(Holder):
    def __init__(self):
        torch.nn.Module.__init__(self)
        self.weight = torch.nn.Parameter(torch.empty(6, 8))

whole = Plain()
initialize(whole, 5)
tp = mesh["tp"].get_local_rank()
for placements, cut in {
    (Shard(0), Shard(1)): lambda w: w.chunk(2, 0)[dp].chunk(2, 1)[tp],
    (Replicate(), Shard(1)): lambda w: w.chunk(2, 1)[tp],
    (Shard(0), Shard(0)): lambda w: w.chunk(2, 0)[dp].chunk(2, 0)[tp],
}.items():
    held = Holder(placements)
    initialize(held, 5)
    assert torch.equal(held.weight.to_local(), cut(whole.weight)), placements

both = Plain()  # tensor parallel first, FSDP after: a strided shard
both.weight = torch.nn.Parameter(
    distribute_tensor(torch.empty(6, 8), mesh["tp"], [Shard(0)], src_data_rank=None)
)
fully_shard(both, mesh=mesh["dp"])
initialize(both, 5)
want = whole.weight.chunk(2, 0)[tp].chunk(2, 0)[dp]
assert torch.equal(both.weight.to_local(), want), both.weight.placements
print("equal")
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 3])
def test_F122_a_shard_is_a_slice_of_the_full_tensor_without_communication(
    rank: int, tmp_path: Path
) -> None:
    script = tmp_path / "shards.py"
    script.write_text(SHARDS)
    done = subprocess.run(
        [sys.executable, str(script), str(rank)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("equal")
