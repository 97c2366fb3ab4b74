"""FSDP2's units of Forge's own models: what is gathered, how often, that gradients are those of one process; starts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from forge_core import Transformer, TransformerConfig
from forge_core.lora import LoRAConfig, lora
from forge_core.model.mtp import MTPConfig
from forge_parallel import ParallelConfig, make_meshes, parallelize
from forge_parallel.axes import fsdp
from forge_resilience import Agreement
from forge_testing import device, run_on_ranks
from forge_train import load_job
from forge_train.build.build import build_trained
from forge_train.loop.assemble import shard

pytestmark = [pytest.mark.distributed, pytest.mark.lane("test")]

V, D = 64, 32
SMALL = {"vocab_size": V, "dim": D, "num_layers": 2, "num_heads": 4, "hidden_dim": 48}
TABLE, NORM = 4 * V * D, 4 * D
TOKENS = torch.arange(16).view(2, 8) * 7 % V


class Units:
    """Bytes of the units as FSDP2 gathers them, one entry per gather, and of those that are gathered at a time."""

    def __init__(self, model: Any) -> None:
        self.gathered: list[tuple[str, int]] = []
        self.alive = self.most = 0
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                group: Any = module._get_fsdp_state()._fsdp_param_group  # type: ignore[attr-defined]
                if group is not None:
                    size = sum(p._orig_size.numel() * width_of(p) for p in group.fsdp_params)
                    group.unshard = self.counted(group, group.unshard, name, size, True)
                    group._to_sharded = self.counted(group, group._to_sharded, name, -size, False)

    def counted(
        self, group: Any, call: Callable[..., Any], name: str, size: int, gathers: bool
    ) -> Callable[..., Any]:
        def counting(*args: Any, **options: Any) -> Any:
            before = group._all_gather_result is not None or group.is_unsharded
            result = call(*args, **options)
            after = group._all_gather_result is not None or group.is_unsharded
            if before != after:
                self.alive += size
                self.most = max(self.most, self.alive)
                if gathers:
                    self.gathered.append((name, size))
            return result

        return counting

    def times(self, name: str) -> int:
        return [n for n, _ in self.gathered].count(name)


def width_of(parameter: Any) -> int:
    dtype: torch.dtype = parameter.mp_policy.param_dtype or parameter.sharded_param.dtype
    return dtype.itemsize


def built(kind: str) -> Transformer:
    mtp = MTPConfig(num_modules=1) if kind == "mtp" else MTPConfig()
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(**SMALL, tie_embeddings=kind == "tied", mtp=mtp))  # type: ignore[arg-type]
    if kind == "lora":
        lora(model, LoRAConfig(("*.q_proj", "*.o_proj"), rank=2))
    return model


def loss_of(model: Any, kind: str, tokens: Tensor) -> Tensor:
    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return F.linear(hidden, weight).square().sum()

    if kind == "mtp":
        following = torch.roll(tokens, -1, 1)[:, None]
        return model(tokens, next_tokens=following).square().sum()
    return model(tokens, loss=loss) if kind == "loss" else model(tokens).square().sum()


class Trained(NamedTuple):
    """Times that each unit was gathered, its bytes, the losses, and the largest error of a gradient."""

    times: dict[str, int]
    sizes: dict[str, int]
    losses: list[float]
    worst: float


def trained(kind: str, options: dict[str, Any], own_unit: int) -> Trained:
    """Two steps of two micro-batches, next to one process."""
    fsdp.OWN_UNIT = own_unit
    alone = built(kind).to(device())
    model = built(kind)
    config = ParallelConfig(device=device().type, precision="fp32", **options)
    meshes = make_meshes(config)
    parallelize(model, config, meshes, report=lambda _: None)
    units, tokens = Units(model), TOKENS.to(device())
    mine = slice(meshes.batch_rank, None, meshes.batch_size)

    worst, losses = 0.0, []
    for _ in range(2):
        model.zero_grad()
        for _ in range(2):  # accumulated
            loss = loss_of(model, kind, tokens[mine])
            loss.backward()
            losses.append(float(loss.detach()))
            loss_of(alone, kind, tokens).backward()
        wanted = {n: p.grad for n, p in alone.named_parameters()}
        for name, parameter in model.named_parameters():
            right, own = wanted[name], parameter.grad
            assert (own is None) == (right is None), name
            if own is not None and right is not None:
                found = own.full_tensor() if hasattr(own, "full_tensor") else own
                worst = max(worst, float((found - right).abs().max() / right.abs().max()))
        with torch.no_grad():
            for parameters in (model.parameters(), alone.parameters()):
                for p in parameters:
                    if p.grad is not None:
                        p.add_(p.grad, alpha=-1e-3)
        alone.zero_grad()
    names = dict.fromkeys(n for n, m in model.named_modules() if isinstance(m, FSDPModule))
    return Trained({n: units.times(n) for n in names}, dict(units.gathered), losses, worst)


def equal_to_one_unit(kind: str, world: int, options: dict[str, Any]) -> list[Trained]:
    """On each rank, after comparing with ends that the root gathers, and with one process."""
    found: list[Trained] = run_on_ranks(world, trained, kind, options, 1)
    for here, root in zip(found, run_on_ranks(world, trained, kind, options, 2**24), strict=True):
        assert here.losses == root.losses
        assert here.worst == root.worst
        # adapters over a base in bf16
        assert here.worst < (5e-2 if kind == "lora" else 1e-5)
    return found


@pytest.mark.parametrize("kind", ["plain", "loss", "lora"])
def test_embedding_and_head_are_units_and_the_embedding_is_gathered_once(kind: str) -> None:
    for here in equal_to_one_unit(kind, 2, {}):
        # in each of four forward and backward passes: the root's norm, embedding and head once, each block twice
        ends = {"": 4, "embedding": 4, "lm_head": 4}
        assert here.times == ends | {"layers.0": 8, "layers.1": 8}
        assert here.sizes[""] == NORM
        assert here.sizes["embedding"] == TABLE


def test_a_tied_embedding_is_gathered_with_the_root() -> None:
    for here in equal_to_one_unit("tied", 2, {}):
        assert here.times == {"": 4, "layers.0": 8, "layers.1": 8}
        assert here.sizes[""] == TABLE + NORM


@pytest.mark.parametrize(
    ("kind", "world", "options"),
    [
        ("mtp", 2, {}),
        ("plain", 4, {"tp": 2}),
        ("plain", 4, {"dp_replicate": 2}),
        ("plain", 2, {"recompute": "full"}),
    ],
)
def test_losses_are_equal_whatever_the_units(
    kind: str, world: int, options: dict[str, Any]
) -> None:
    for here in equal_to_one_unit(kind, world, options):
        assert "embedding" in here.times


# ---- the sizes of an 8B model


@contextmanager
def fake_ranks(world: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore  # torch 2.0 to 2.15

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def units_of_8b(layers: int) -> dict[str, int]:
    """A training step of rank 0 of 8 in bf16, of tensors without values."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # torch 2.0 to 2.15

    sizes = {"vocab_size": 128256, "dim": 4096, "num_heads": 32, "num_kv_heads": 8}
    config = TransformerConfig(**sizes, hidden_dim=14336, num_layers=layers)  # type: ignore[arg-type]
    parallel = ParallelConfig(device="cpu", precision="bf16")
    with fake_ranks(8):
        meshes = make_meshes(parallel)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with torch.device("meta"):
            model = Transformer(config)
        with mode:
            model.to_empty(device="cpu")
        parallelize(model, parallel, meshes, report=lambda _: None)
        units = Units(model)
        with mode:
            model(torch.zeros(1, 64, dtype=torch.int64)).sum().backward()
    sizes_of = dict(units.gathered)
    return {
        "root": sizes_of[""],
        "largest": max(sizes_of.values()),
        "gathered": sum(size for _, size in units.gathered),
        "alive": units.most,
    }


def test_the_root_of_8b_gathers_one_norm() -> None:
    """An embedding and a head of 1.05 GB, and blocks of 436 MB in bf16: two neighbors are gathered at a time."""
    (found,) = run_on_ranks(1, units_of_8b, 3)
    table, block, norm = 2 * 128256 * 4096, 436_224_000, 2 * 4096
    assert found["root"] == norm
    assert found["largest"] == table
    # of 32 layers: 30.02 GB
    assert found["gathered"] == 2 * table + 2 * 3 * block + norm
    assert found["alive"] == table + block + norm


# ---- the start of a 70B model


class Held(TorchDispatchMode):
    """Bytes of the storages that operators make and that are alive, and the most of them at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                self._hold(getattr(tensor, "_local_tensor", tensor).untyped_storage())
        return out

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def start_of_70b(world: int, recipe: str) -> tuple[int, int, int]:
    """Bytes of rank 0 of many: most at a time, of its shard, of a layer. On CPUs, as `forge-train run` begins."""
    flags = {"parallel.device": "cpu", "parallel.dp_shard": world, "train.global_batch": world}
    with fake_ranks(world):
        config = load_job(recipe, flags, with_data=False).config
        meshes = make_meshes(config.parallel)
        with Held() as held:
            model = shard(build_trained(config), config, meshes, Agreement())
        local = [p.to_local() for p in model.parameters()]  # type: ignore[operator]
        assert all(bool(p.isfinite().all()) for p in local)
        layer = sum(p.numel() * p.element_size() for p in model.layers["0"].parameters())  # type: ignore[index]
        return held.most, sum(p.nbytes for p in local), layer


@pytest.mark.lane("quick")
def test_the_start_of_70b_holds_no_more_than_a_shard_and_a_layer() -> None:
    """A shard of 276 MB on each of 1,024 ranks; an embedding is 4.2 GB, and a layer 3.4 GB."""
    recipe = str(Path(__file__).parents[2] / "configs/recipes/70b.toml")
    ((most, shard_bytes, layer),) = run_on_ranks(1, start_of_70b, 1024, recipe)
    assert 4 * 70.55e9 / 1024 < shard_bytes < 1.01 * 4 * 70.56e9 / 1024
    assert layer == pytest.approx(3.42e9, rel=0.01)
    # pieces of random bits, and the numbers of rows and columns
    assert most - shard_bytes < 2**25 < layer
