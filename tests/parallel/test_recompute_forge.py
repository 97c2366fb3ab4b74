"""Recomputation and compiled blocks on Forge's own models: routes are replayed, packed rows do not recompile."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core import AttentionSpec, Transformer, TransformerConfig
from forge_moe import MoE, MoEConfig, expert_parallelize, recompute_contexts
from forge_parallel import ParallelConfig, make_meshes, parallelize
from forge_parallel._shared.shards import local_tensor
from forge_parallel.axes.context import shard_sequence
from forge_parallel.compile import compile_blocks, recompilations
from forge_parallel.recompute import recompute
from forge_testing import run_on_ranks

pytestmark = pytest.mark.lane("test")

VOCAB, SEQ = 64, 32


def dense() -> Transformer:
    config = TransformerConfig(vocab_size=VOCAB, dim=32, num_layers=3, num_heads=4, max_seq_len=SEQ)
    return Transformer(config)


def mixture() -> Transformer:
    config = TransformerConfig(vocab_size=VOCAB, dim=32, num_layers=2, num_heads=4, max_seq_len=SEQ)
    experts = MoEConfig(
        backend="loop",  # a batch of all experts is padded to the largest group, so that other routes are an error
        dim=32,
        hidden_dim=32,
        num_experts=4,
        top_k=2,
        aux="attach",
        aux_loss_weight=0.1,
    )
    torch.manual_seed(0)
    return Transformer(config, feed_forward=lambda _: MoE(experts))


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(seed))


class Exchanges(TorchDispatchMode):
    """Counts all-to-all exchanges."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += "alltoall" in str(func)
        return func(*args, **(kwargs or {}))


def exchanges_of_experts() -> None:
    """Tokens and sums are sent once with "selective", as without recomputation; "full" sends them again."""
    found = {}
    for mode in ("none", "selective", "full"):
        model = expert_parallelize(mixture(), init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
        recompute(model.blocks(), mode, contexts=recompute_contexts)
        for halves in (False, True):
            with Exchanges() as count:
                found[mode, halves] = gradients(model, halves), count.calls
    layers = 2
    for halves in (False, True):
        wanted, calls = found["none", halves]
        assert calls == layers * (3 + 2) or halves
        for mode, more in (("selective", 0), ("full", 2 * layers * (1 + halves))):
            assert found[mode, halves][1] == calls + more
            for one, other in zip(found[mode, halves][0], wanted, strict=True):
                assert torch.equal(local_tensor(one), local_tensor(other))


class Flash(TorchDispatchMode):
    """Counts the forwards of flash attention."""

    forwards = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.forwards += op.name() == "aten::_scaled_dot_product_flash_attention_for_cpu"
        return op(*args, **(kwargs or {}))


def test_attention_with_sinks_is_not_computed_again_by_selective_recomputation() -> None:
    shape: dict[str, Any] = {"vocab_size": VOCAB, "dim": 32, "num_layers": 3, "num_heads": 4}
    tokens = torch.randint(0, VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(0))
    found, gradients = {}, {}
    for mode in ("none", "selective", "full"):
        torch.manual_seed(0)
        model = Transformer(TransformerConfig(**shape, attention=AttentionSpec(sinks=True)))
        recompute(model.blocks(), mode)
        with Flash() as flash:
            model(tokens).sin().sum().backward()
        found[mode] = flash.forwards
        gradients[mode] = [p.grad for p in model.parameters()]
    assert found == {"none": 3, "selective": 3, "full": 6}
    for mode in ("selective", "full"):
        assert all(torch.equal(a, b) for a, b in zip(gradients[mode], gradients["none"]))


def test_selective_recomputation_sends_no_token_again() -> None:
    run_on_ranks(2, exchanges_of_experts)


def documents(*lengths: int) -> Tensor:
    """Rows cut alike into documents of these lengths, the last one filling up."""
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    row = torch.cat([row, torch.full((SEQ - row.numel(),), len(lengths))])
    return row.expand(2, SEQ)


def gradients(model: Transformer, halves: bool = False, **given: Any) -> list[Tensor]:
    loss = model(tokens(), **given).float().square().mean()
    parameters = list(model.parameters())
    if halves:
        torch.autograd.grad(loss, parameters[:1], retain_graph=True)
    return list(torch.autograd.grad(loss, parameters))


def layers_of(model: Transformer) -> list[MoE]:
    return [m for m in model.modules() if isinstance(m, MoE)]


@pytest.mark.parametrize("halves", [False, True], ids=["whole", "halves"])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_mixtures_recompute_to_the_same_bits_and_count_once(mode: str, halves: bool) -> None:
    plain, model = mixture(), mixture()
    names = list(model.state_dict())
    recompute(model.blocks(), mode, contexts=recompute_contexts)
    assert list(model.state_dict()) == names
    for found, expected in zip(gradients(model, halves), gradients(plain, halves), strict=True):
        assert torch.equal(found, expected)
    for layer in layers_of(model):
        assert int(layer.statistics()["tokens"]) == 2 * SEQ


def rows_per_expert(mode: str, contexts: Any) -> list[list[int]]:
    """What the first layer's experts get, in the forward and in the recomputation, where the router
    changes in between: decided again, tokens would go elsewhere."""
    model = mixture()
    counts: list[list[int]] = []
    first = layers_of(model)[0]
    first.experts.register_forward_pre_hook(
        lambda _, args: counts.append(torch.as_tensor(args[1]).tolist())
    )
    recompute(model.blocks(), mode, contexts=contexts)
    loss = model(tokens()).float().square().mean()
    torch.manual_seed(1)
    for layer in layers_of(model):
        layer.router.weight.data = torch.randn_like(layer.router.weight)
    loss.backward()
    return counts


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_routes_are_replayed(mode: str) -> None:
    forward, again = rows_per_expert(mode, recompute_contexts)
    assert forward == again


def test_without_contexts_routes_would_be_decided_again() -> None:
    forward, again = rows_per_expert("full", None)  # and no error
    assert forward != again


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "full"])
def test_packed_rows_do_not_recompile(mode: str) -> None:
    torch._dynamo.reset()
    plain, model = dense(), dense()
    recompute(model.blocks(), mode)
    compile_blocks(model, "aot_eager")
    packs = [
        documents(10, 12),
        documents(3, 20),
        documents(7, 7, 7),
        documents(25),
        documents(1, 2),
    ]
    before: dict[str, int] = {}
    for pack in packs:
        for found, expected in zip(
            gradients(model, document_ids=pack), gradients(plain, document_ids=pack), strict=True
        ):
            assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
        before = before or recompilations()
    assert recompilations() == before


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "full"])
def test_mixtures_compile_their_other_parts(mode: str) -> None:
    torch._dynamo.reset()
    plain, model = mixture(), mixture()
    recompute(model.blocks(), mode, contexts=recompute_contexts)
    compile_blocks(model, "aot_eager")
    before: dict[str, int] = {}
    for pack in (None, documents(10, 12), documents(3, 20)):
        for found, expected in zip(
            gradients(model, document_ids=pack), gradients(plain, document_ids=pack), strict=True
        ):
            assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
        before = recompilations() if pack is not None and not before else before
    assert recompilations() == before
    assert before["graphs"] > 0


def graph_breaks(kind: str) -> tuple[set[str], set[str]]:
    """Compiled modules of the first block, and functions at which compiled code stops."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options = {"cp": {"cp": 2}, "ep": {"ep": 2}}.get(kind, {})
    parallel = ParallelConfig(device="cpu", compile=True, **options)
    meshes = make_meshes(parallel)
    model = mixture() if kind in ("experts", "ep") else dense()
    if kind == "ep":
        expert_parallelize(model, meshes.sparse["ep"])
    model = parallelize(model, parallel, meshes, compile_backend="aot_eager")

    given, ids = {}, tokens()
    if kind == "cp":
        positions = torch.arange(SEQ).expand(2, SEQ)
        given = {"positions": shard_sequence(positions, meshes.cp)}
        ids = shard_sequence(ids, meshes.cp)
    elif kind == "packed":
        given = {"document_ids": documents(10, 12)}
    model(ids, **given).square().mean().backward()

    compiled = {n for n, m in model.named_modules() if getattr(m, "compiled", None) is not None}
    found = torch._dynamo.utils.counters["graph_break"]
    stops = {name for text in found for name in re.findall(r"<function ([\w.]+) at", text)}
    return {name for name in compiled if name.startswith("layers.0")}, stops


PARTS_AROUND_EXPERTS = {"layers.0." + n for n in ("mixer_norm", "mixer", "feed_forward_norm")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "compiled", "stops"),
    [
        ("plain", {"layers.0"}, set()),
        ("packed", {"layers.0"}, {"_attend_documents_of"}),
        ("cp", {"layers.0"}, {"ContextAttention.__call__"}),
        ("experts", PARTS_AROUND_EXPERTS, set()),
        ("ep", PARTS_AROUND_EXPERTS, set()),
    ],
)
def test_compiled_blocks_break_where_the_readme_lists_it(
    kind: str, compiled: set[str], stops: set[str]
) -> None:
    assert run_on_ranks(2, graph_breaks, kind) == [(compiled, stops)] * 2
