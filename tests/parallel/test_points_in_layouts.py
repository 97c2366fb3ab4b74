"""Points of a model in layouts: whole values on every rank, equal to one process; changes of whole values."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forge_core import AttentionSpec, Transformer, TransformerConfig
from forge_core.interp import ActivationStore, intervene
from forge_data import Batch
from forge_moe import MoE, MoEConfig
from forge_parallel import Meshes, ParallelConfig, make_meshes, parallelize
from forge_parallel.compute import Compute
from forge_parallel.points import WholePoints
from forge_testing import run_on_ranks

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


def build(kind: str) -> Transformer:
    """Dense with shared heads, a window and QK-norms; or with experts and one key head for all ranks."""
    common = {"vocab_size": VOCAB, "dim": 16, "num_layers": 2, "num_heads": 4, "init_std": 0.3}
    if kind == "dense":
        spec = AttentionSpec(window=6, scale=0.4)
        config = TransformerConfig(**common, num_kv_heads=2, qk_norm=True, attention=spec)
        return Transformer(config).eval()
    experts = MoEConfig(dim=16, hidden_dim=24, num_experts=4, top_k=2)
    config = TransformerConfig(**common, num_kv_heads=1)
    return Transformer(config, feed_forward=lambda i: MoE(experts)).eval()


def batch_of(seed: int, rows: int, packed: bool) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (rows, SEQ), generator=generator)
    ends = (5, 6, SEQ) if packed else (SEQ,)
    lengths = [end - begin for begin, end in zip((0, *ends), ends)]
    ids = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)]).expand(rows, SEQ)
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(rows, SEQ)
    return Batch(tokens=tokens, labels=tokens, document_ids=ids.contiguous(),
                 positions=positions.contiguous(), instance_ids=torch.arange(rows),
                 digest="0" * 16)  # fmt: skip


def call(model: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(batch.tokens, batch.positions, batch.document_ids)
    return out


class Rank:
    """A model in a layout on this rank, and the same model alone."""

    def __init__(self, kind: str, layout: dict[str, Any]) -> None:
        config = ParallelConfig(precision="fp32", **layout)
        self.meshes: Meshes = make_meshes(config)
        self.model, self.alone = build(kind), build(kind)
        parallelize(self.model, config, self.meshes, seq_len=SEQ)
        self.whole = WholePoints(self.model, config, self.meshes)
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
        return store[name][first : first + len(value)]

    logits = {}
    own = {name: restore for name in store.names if "attn_" not in name and name != "logits"}
    scores = {"*.attn_scores": restore, "*.attn_weights": restore}
    ablate = {"layers.1.head_out": lambda x, _: x * KEEP}
    runs = {
        "own": (own, clean),
        "scores": (scores, clean),
        "patched": ({"layers.0.resid_post": restore}, other),
        "steered": ({"logits": lambda x, _: x + torch.arange(VOCAB)}, clean),
        "ablated": (ablate, clean),
        "other": ({}, other),
    }
    for name, (changes, batch) in runs.items():
        seen.clear()
        with intervene(rank.model, changes, whole=rank.whole) if changes else _nothing():
            logits[name] = rank.read(batch, "logits")["logits"]
    found["own"] = logits["own"].equal(store["logits"])
    found["patched"] = logits["patched"].equal(store["logits"])
    found["patch matters"] = off(logits["other"], store["logits"]) > 0.1
    found["scores"] = off(logits["scores"], store["logits"])
    found["steered"] = off(logits["steered"], store["logits"] + torch.arange(VOCAB))
    zeroed = copy.deepcopy(rank.alone)
    with torch.no_grad():
        zeroed.layers["1"].mixer.o_proj.weight[:, 4:8] = 0
    found["ablated"] = off(logits["ablated"], call(zeroed, clean))
    found["ablation matters"] = off(logits["ablated"], store["logits"]) > 0.01
    return found


def _nothing() -> Any:
    return torch.no_grad()


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["dense", "experts"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_values_and_changes_are_those_of_one_process(layout: str, kind: str) -> None:
    world = 4 if layout.count("2") > 1 else 2
    for found in run_on_ranks(world, compare, kind, layout):
        assert found["names"]
        assert max(found["values"].values()) < CLOSE, found["values"]
        assert found["own"] and found["patched"], "the same bits"
        assert found["patch matters"] and found["ablation matters"]
        assert max(found["scores"], found["ablated"], found["steered"]) < CLOSE, found
