"""Points of a model in layouts: whole values on every rank, equal to one process; changes of whole values."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forge_core import AttentionSpec, Transformer, TransformerConfig
from forge_core.interp import ActivationStore, intervene
from forge_core.model import MLAConfig
from forge_data import Batch
from forge_moe import MoE, MoEConfig
from forge_parallel import Meshes, ParallelConfig, make_meshes, parallelize
from forge_parallel.compute import Compute
from forge_parallel.points import UnshardedPoints
from forge_testing import device, run_on_ranks
from forge_testing.problems import assert_problem

pytestmark = pytest.mark.lane("test")

ROWS, SEQ, VOCAB = 2, 16, 67  # no number of ranks divides the vocabulary
KEEP = torch.tensor([1.0, 0, 1, 1])[:, None]
CLOSE = 1e-5  # fp32, other orders of sums
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "tp2": {"tp": 2},
    "tp2-whole-tokens": {"tp": 2, "sequence_parallel": False},
    "cp2": {"cp": 2},
    "cp2-ring": {"cp": 2, "cp_exchange": "ring"},
    "pp2": {"pp": 2},
    "fsdp2-tp2": {"tp": 2},
    "tp2-cp2": {"tp": 2, "cp": 2},
    "tp2-pp2": {"tp": 2, "pp": 2},
}


#: Each kind with each axis, and each layout with some kind.
CELLS = [
    ("dense", "tp2-whole-tokens"),
    ("dense", "cp2-ring"),
    pytest.param("dense", "fsdp2-tp2", marks=pytest.mark.lane("ci")),
    ("dense", "tp2-pp2"),
    ("dense", "cp2"),
    ("experts", "fsdp2"),
    ("experts", "tp2"),
    ("experts", "pp2"),
    pytest.param("experts", "tp2-cp2", marks=pytest.mark.lane("ci")),
    ("latent", "tp2-cp2"),
]


def build(kind: str) -> Transformer:
    """Dense with shared heads, a window and QK-norms; or with experts and one key head for all ranks."""
    common = {"vocab_size": VOCAB, "dim": 16, "num_layers": 2, "num_heads": 4, "init_std": 0.3}
    if kind == "dense":
        spec = AttentionSpec(window=6, scale=0.4)
        config = TransformerConfig(**common, num_kv_heads=2, qk_norm=True, attention=spec)
        return Transformer(config).eval().to(device())
    if kind == "latent":
        mla = MLAConfig(
            kv_lora_rank=8, q_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5
        )
        return Transformer(TransformerConfig(**common, mixer="mla", mla=mla)).eval().to(device())
    experts = MoEConfig(dim=16, hidden_dim=24, num_experts=4, top_k=2)
    config = TransformerConfig(**common, num_kv_heads=1)
    return Transformer(config, feed_forward=lambda i: MoE(experts)).eval().to(device())


def batch_of(seed: int, rows: int, packed: bool) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (rows, SEQ), generator=generator)
    ends = (5, 6, SEQ) if packed else (SEQ,)
    lengths = [end - begin for begin, end in zip((0, *ends), ends)]
    ids = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)]).expand(rows, SEQ)
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(rows, SEQ)
    batch = Batch(tokens=tokens, labels=tokens, document_ids=ids.contiguous(),
                  positions=positions.contiguous(), instance_ids=torch.arange(rows),
                  digest="0" * 16)  # fmt: skip
    return batch.to(device())


def call(model: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(batch.tokens, batch.positions, batch.document_ids)
    return out


class Rank:
    """A model in a layout on this rank, and the same model alone."""

    def __init__(self, kind: str, layout: dict[str, Any]) -> None:
        config = ParallelConfig(device=device().type, precision="fp32", **layout)
        self.meshes: Meshes = make_meshes(config)
        self.model, self.alone = build(kind), build(kind)
        parallelize(self.model, config, self.meshes, seq_len=SEQ)
        self.whole = UnshardedPoints(self.model, config, self.meshes)
        parts = 2 if config.pp > 1 else 1  # micro-batches
        self.compute = Compute(
            self.model, config, self.meshes, micro_batch=ROWS // parts, num_micro_batches=parts,
            seq_len=SEQ, loss=_no_loss, sharded_loss=_no_loss,
        )  # fmt: skip

    def rows(self, seed: int, packed: bool) -> Batch:
        every = batch_of(seed, ROWS * self.meshes.batch_size, packed)
        return every.split(ROWS)[self.meshes.batch_rank]

    def read(self, batch: Batch, points: Any = "*", **options: Any) -> ActivationStore:
        store = ActivationStore(points, whole=self.whole, **options)
        with store.watch(self.model):
            self.compute.forward(batch)
        return store


def _no_loss(*_: Any) -> Tensor:
    raise AssertionError("no loss is computed")


def alone_store(model: nn.Module, batch: Batch) -> ActivationStore:
    store = ActivationStore("*")
    with store.watch(model):
        call(model, batch)
    return store


def off(found: Tensor, wanted: Tensor) -> float:
    if found.shape != wanted.shape:
        return float("inf")
    found, wanted = found.cpu(), wanted.cpu()  # stores keep what they saw on the host
    return float((found - wanted).abs().max() / wanted.abs().max())


def compare(kind: str, layout: str) -> dict[str, Any]:
    """Errors of this rank, by name."""
    rank, packed = Rank(kind, LAYOUTS[layout]), kind == "dense"
    clean, other = rank.rows(0, packed), rank.rows(1, packed)
    wanted, store = alone_store(rank.alone, clean), rank.read(clean)
    found: dict[str, Any] = {"names": sorted(store.names) == sorted(wanted.names)}
    found["values"] = {n: off(store[n], wanted[n]) for n in wanted.names if n in store.names}

    seen: dict[str, int] = {}

    def restore(value: Tensor, name: str) -> Tensor:
        """The clean value; under pp of one micro-batch after another."""
        first = seen[name] = seen.get(name, 0)
        seen[name] += len(value)
        return store[name][first : first + len(value)].to(value.device)

    logits = {}
    own = [n for n in store.names if n.startswith("layers.0.") and "attn_" not in n]
    scores = {"*.attn_scores": restore, "*.attn_weights": restore}
    ablate = {"layers.1.head_out": lambda x, _: x * KEEP.to(x)}
    runs = {
        **{name: ({name: restore}, clean) for name in own},
        "scores": (scores, clean),
        "patched": ({"layers.0.resid_post": restore}, other),
        "steered": ({"logits": lambda x, _: x + torch.arange(VOCAB, device=x.device)}, clean),
        "ablated": (ablate, clean),
        "other": ({}, other),
    }
    for name, (changes, batch) in runs.items():
        seen.clear()
        with intervene(rank.model, changes, whole=rank.whole) if changes else _nothing():
            logits[name] = rank.read(batch, "logits")["logits"]
    found["own"] = [name for name in own if not logits[name].equal(store["logits"])]
    found["patched"] = logits["patched"].equal(store["logits"])
    found["patch matters"] = off(logits["other"], store["logits"]) > 0.1
    found["scores"] = off(logits["scores"], store["logits"])
    found["steered"] = off(
        logits["steered"], store["logits"] + torch.arange(VOCAB, device=store["logits"].device)
    )
    zeroed = copy.deepcopy(rank.alone)
    with torch.no_grad():
        weight = zeroed.layers["1"].mixer.o_proj.weight
        weight[:, weight.size(1) // 4 : weight.size(1) // 2] = 0  # head 1 of 4
    found["ablated"] = off(logits["ablated"], call(zeroed, clean))
    found["ablation matters"] = off(logits["ablated"], store["logits"]) > 0.01
    return found


def _nothing() -> Any:
    return torch.no_grad()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("kind", "layout"), CELLS)
def test_gathered_values_and_changes_are_those_of_one_process(layout: str, kind: str) -> None:
    world = 4 if layout.count("2") > 1 else 2
    for found in run_on_ranks(world, compare, kind, layout):
        assert found["names"]
        assert max(found["values"].values()) < CLOSE, found["values"]
        assert found["own"] == []
        assert found["patched"]
        assert found["patch matters"]
        assert found["ablation matters"]
        assert max(found["scores"], found["ablated"], found["steered"]) < CLOSE, found


def options(folder: Path) -> dict[str, Any]:
    rank = Rank("dense", LAYOUTS["pp2"])
    batch = rank.rows(0, True)
    wanted = alone_store(rank.alone, batch)
    points, here = ("*.resid_post", "*.attn_weights"), folder / str(rank.meshes.rank)
    half = rank.read(batch, points, every=2, dtype=torch.bfloat16, folder=here)
    found = {n: half[n].equal(wanted[n][::2].bfloat16()) for n in half.names}
    found["bytes"] = half.nbytes == sum(f.stat().st_size for f in here.iterdir())
    size = sum(wanted[n].nbytes for n in found if n in wanted.names)
    refused = []
    for most in (size, size - 1):
        try:
            found[f"{most}"] = rank.read(batch, points, max_bytes=most).nbytes == size
        except ValueError as error:
            refused.append(error)
    return {"found": found, "refused": refused, "size": size}


@pytest.mark.lane("quick")
@pytest.mark.distributed
def test_a_store_on_two_stages_has_the_options_of_one(tmp_path: Path) -> None:
    for rank in run_on_ranks(2, options, tmp_path):
        assert len(rank["found"]) == 6
        assert all(rank["found"].values()), rank["found"]
        size = rank["size"]
        (error,) = rank["refused"]
        assert_problem(error, "max_bytes", size - 1, "range")
        assert str(size) in str(error)


class Odd(nn.Module):
    """A feed-forward with a point of its own."""

    points = ("mine",)

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(16, 24), nn.Linear(24, 16)

    def point(self, name: str, value: Tensor) -> Tensor:
        return value

    def forward(self, x: Tensor, ctx: Any = None) -> Tensor:
        out: Tensor = self.down_proj(self.point("mine", self.up_proj(x).relu()))
        return out

    def parallel_roles(self) -> dict[str, str]:
        return {"up_proj.*": "colwise", "down_proj.*": "rowwise"}


def of_ones_own() -> list[Any]:
    config = ParallelConfig(device=device().type, precision="fp32", tp=2)
    meshes, batch = make_meshes(config), batch_of(0, ROWS, packed=False)
    shape = TransformerConfig(vocab_size=64, dim=16, num_layers=1, num_heads=4)
    model, alone = (
        Transformer(shape, feed_forward=lambda i: Odd()).eval().to(device()) for _ in range(2)
    )
    alone.load_state_dict(model.state_dict())
    parallelize(model, config, meshes, seq_len=SEQ)
    batch = replace(batch, tokens=batch.tokens % 64)
    found: list[Any] = []
    known = UnshardedPoints(model, config, meshes, {"mine": "width"})
    with ActivationStore("*.mine", whole=known).watch(model) as store:
        call(model, batch)
    found.append(off(store["layers.0.mine"], alone_store(alone, batch)["layers.0.mine"]))
    whole = UnshardedPoints(model, config, meshes)
    for refused in (
        lambda: ActivationStore("*.mine", whole=whole).watch(model).__enter__(),
        lambda: _with_gradients(model, batch, whole),
    ):
        try:
            refused()
        except ValueError as error:
            found.append(error)
    interleaved = replace(config, tp=1, pp=2, pp_schedule="interleaved_1f1b")
    two = nn.Module()
    two.__dict__["pipeline_stages"] = [nn.Module(), nn.Module()]
    try:
        UnshardedPoints(two, interleaved, meshes)
    except ValueError as error:
        found.append(error)
    return found


def _with_gradients(model: nn.Module, batch: Batch, whole: UnshardedPoints) -> None:
    with intervene(model, {"layers.0.resid_post": lambda x, _: x * 2}, whole=whole):
        model(batch.tokens, batch.positions, batch.document_ids)


@pytest.mark.distributed
def test_custom_points_have_a_kind_and_others_are_rejected() -> None:
    for worst, *refused in run_on_ranks(2, of_ones_own):
        assert worst < CLOSE
        wanted = (
            ("point", "layers.0.mine", "kind"),
            ("layers.0.resid_post", ..., "gradient"),
            ("pp_schedule", "interleaved_1f1b", "stages"),
        )
        for error, problem in zip(refused, wanted, strict=True):
            assert_problem(error, *problem)


class Gathered(Transformer):
    """Its head gives whole logits on every rank, as those of Hugging Face models do."""

    def parallel_roles(self) -> dict[str, Any]:
        roles = super().parallel_roles()
        return {k: "gather_output" if r == "sharded_logits" else r for k, r in roles.items()}


def change_of_whole_logits() -> dict[str, float]:
    config = ParallelConfig(device=device().type, precision="fp32", tp=2)
    meshes, model = make_meshes(config), build("dense")
    model.__class__, batch = Gathered, batch_of(0, ROWS, True)
    alone = call(model, batch)
    parallelize(model, config, meshes, seq_len=SEQ)
    whole, found = UnshardedPoints(model, config, meshes), {}
    store = ActivationStore("logits", whole=whole)
    with intervene(model, {"logits": lambda x, _: x.neg_()}, whole=whole), store.watch(model):
        found["changed"] = off(call(model, batch), -alone)
    found["read"] = off(store["logits"], -alone)
    return found


@pytest.mark.distributed
def test_full_logits_of_every_rank_are_changed_in_place() -> None:
    for found in run_on_ranks(2, change_of_whole_logits):
        assert max(found.values()) < CLOSE, found
