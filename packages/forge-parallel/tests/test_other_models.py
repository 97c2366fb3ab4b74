"""Models of transformers as they come, without a method of ours: units, recomputation, compilation, cuts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from forge_parallel import ParallelConfig, make_meshes, parallelize
from forge_parallel.axes import fsdp
from forge_parallel.compile import recompilations
from forge_parallel.prove import prove
from forge_parallel.prove.cells import CELLS
from forge_testing import device, run_on_ranks
from forge_testing.problems import assert_problem

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.distributed
OWN_RANKS = pytest.mark.cpu_only(reason="prove forks its ranks, on CPUs")

VOCAB, DIM = 64, 32
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
KINDS = ("Llama", "Qwen3", "Gemma2")


def build(kind: str, **options: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(**SIZES | options)
    return transformers.AutoModelForCausalLM.from_config(config).train()


@OWN_RANKS
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_green_in_every_layout_but_those_that_its_forward_forbids(kind: str) -> None:
    results = {(r.cell, r.world): r for r in prove(lambda: build(kind), vocab_size=VOCAB)}
    refused = {cell for (cell, _), r in results.items() if r.verdict == "refused"}
    assert refused == {"cp", *(c.name for c in CELLS if "pp" in c.layout and c.world <= 4)}
    assert_problem(results["cp", 2], "positions", ..., "missing")
    assert_problem(results["pp", 2], "pipeline_parts", ..., "missing")
    assert f"{kind}ForCausalLM" in results["cp", 2].message
    green = {key: r for key, r in results.items() if key[0] not in refused}
    assert {r.verdict for r in green.values()} == {"green"}, green
    assert all({"stream", "gradient", "text"} <= r.errors.keys() for r in green.values())


@pytest.mark.slow
@OWN_RANKS
@pytest.mark.parametrize(("kind", "cell"), [("Qwen3", "tp, whole stream"), ("Gemma2", "recompute")])
def test_green(kind: str, cell: str) -> None:
    (result,) = prove(lambda: build(kind), vocab_size=VOCAB, worlds=[2], only=cell)
    assert result.verdict == "green", result


@pytest.mark.slow
@OWN_RANKS
def test_a_filling_that_a_softcap_would_count_is_rejected() -> None:
    def odd() -> Any:
        return build("Gemma2", vocab_size=VOCAB + 1, final_logit_softcapping=1.0)

    (result,) = prove(odd, vocab_size=VOCAB, worlds=[2], only="tp, whole stream")
    assert result.verdict == "refused"
    assert_problem(result, "lm_head", 65, "softcap")


# ---- caches of keys, which transformers makes in every forward unless it is told not to


def caches_and_graphs(options: dict[str, Any]) -> tuple[set[bool], int]:
    """Whether attention was given no cache, in the forward and again, and how many graphs were compiled."""
    model, seen = build("Llama"), []
    config = ParallelConfig(device=device().type, precision="fp32", **options)
    before = recompilations()["graphs"]
    for layer in model.model.layers:
        look = lambda _, args, kwargs: seen.append(kwargs["past_key_values"] is None)  # noqa: E731
        if not config.compile:
            layer.self_attn.register_forward_pre_hook(look, with_kwargs=True)
    parallelize(
        model, config, make_meshes(config), compile_backend="aot_eager", report=lambda _: None
    )
    for _ in range(2):
        model(torch.arange(8, device=device()).view(2, 4)).logits.sum().backward()
    assert len(seen) == (0 if config.compile else 12)
    return set(seen), recompilations()["graphs"] - before


@pytest.mark.slow
def test_recomputation_and_compilation_see_no_empty_cache() -> None:
    assert run_on_ranks(1, caches_and_graphs, {"recompute": "full"}) == [({True}, 0)]
    assert run_on_ranks(1, caches_and_graphs, {"compile": True}) == [(set(), 1)]  # for all layers


def with_a_prefix() -> ValueError | None:
    config = ParallelConfig(device=device().type, precision="fp32", recompute="full")
    model = parallelize(build("Llama"), config, make_meshes(config), report=lambda _: None)
    cache = transformers.DynamicCache(config=model.config)
    for layer in range(3):
        cache.update(*torch.ones(2, 2, 2, 5, 8, device=device()), layer)
    try:
        model(torch.arange(8, device=device()).view(2, 4), past_key_values=cache)
    except ValueError as error:
        return error
    return None


@pytest.mark.lane("test")
def test_a_learned_prefix_is_not_recomputed() -> None:
    (error,) = run_on_ranks(1, with_a_prefix)
    assert_problem(error, "past_key_values", 5, "cache")


# ---- units of FSDP2


class Sent(TorchDispatchMode):
    """Bytes of each collective of FSDP2, whole: what all ranks have after a gather, or before a scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered: list[int] = []
        self.scattered: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_allgather_base_" in func.name():
            self.gathered.append(args[0].nbytes)
        if "_reduce_scatter_base_" in func.name():
            self.scattered.append(args[1].nbytes)
        return func(*args, **(kwargs or {}))


def gathered(own_unit: int, tied: bool, **options: Any) -> tuple[list[str], list[int], float]:
    """Names of the units, bytes of each all-gather of a forward, and the worst error of a gradient."""
    fsdp.OWN_UNIT = own_unit
    torch.manual_seed(0)
    model = build("Llama", tie_word_embeddings=tied)
    torch.manual_seed(0)
    alone = build("Llama", tie_word_embeddings=tied)
    config = ParallelConfig(device=device().type, precision="fp32", **options)
    meshes = make_meshes(config)
    parallelize(model, config, meshes, report=lambda _: None)
    tokens = torch.arange(8, device=device()).view(2, 4)
    with Sent() as sent:
        model(tokens[meshes.batch_rank : meshes.batch_rank + 1]).logits.square().sum().backward()
    alone(tokens).logits.square().sum().backward()
    wanted = dict(alone.named_parameters())
    worst = 0.0
    for name, parameter in model.named_parameters():
        right = wanted[name].grad
        worst = max(worst, float((parameter.grad.full_tensor() - right).abs().max() / right.abs().max()))  # fmt: skip
    units = [n for n, m in model.named_modules() if isinstance(m, FSDPModule)]
    return units, sent.gathered, worst


LAYERS = [f"model.layers.{i}" for i in range(3)]
BLOCK = 4 * (2 * DIM * DIM + 2 * DIM * DIM // 2 + 3 * 48 * DIM + 2 * DIM)
TABLE = 4 * VOCAB * DIM


def test_units_are_the_layers_and_the_ends_where_they_are_large() -> None:
    for units, sizes, worst in run_on_ranks(2, gathered, TABLE // 4, False):
        assert units == ["", "model.embed_tokens", *LAYERS, "lm_head"]
        # the norm with the root, each layer twice, embedding and head once
        assert sorted(sizes)[-1] == BLOCK > TABLE
        assert (sizes.count(BLOCK), sizes.count(TABLE)) == (6, 2)
        assert sum(sizes) == 6 * BLOCK + 2 * TABLE + 4 * DIM
        assert worst < 1e-5


def test_small_ends_and_tied_ones_are_gathered_with_the_root() -> None:
    for units, sizes, worst in run_on_ranks(2, gathered, TABLE // 4 + 1, False):
        assert units == ["", *LAYERS]
        assert sizes.count(2 * TABLE + 4 * DIM) == 1
        assert worst < 1e-5
    for units, sizes, worst in run_on_ranks(2, gathered, 1, True):
        assert units == ["", *LAYERS]
        assert sizes.count(TABLE + 4 * DIM) == 1
        assert worst < 1e-5


# ---- a frozen base in 16 bits


def on_a_frozen_base(precision: str, trained: str) -> dict[str, Any]:
    """One step of a Llama that came in bf16, of which the parameters with `trained` in their name learn."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(build("Llama").bfloat16())
        for name, parameter in models[-1].named_parameters():
            parameter.requires_grad_(trained in name)
    alone, model = models[0].float().to(device()), models[1]
    config = ParallelConfig(device=device().type, precision=precision)  # type: ignore[arg-type]
    meshes = make_meshes(config)
    parallelize(model, config, meshes, report=lambda _: None)
    rows = 2 // meshes.batch_size
    tokens = torch.arange(8, device=device()).view(2, 4)
    with Sent() as sent:
        out = model(tokens[meshes.batch_rank * rows :][:rows]).logits.float().square().sum()
        held = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
        out.backward()
    alone(tokens).logits.square().sum().backward()
    wanted, worst = dict(alone.named_parameters()), 0.0
    for name, parameter in model.named_parameters():
        if trained in name:
            right = wanted[name].grad
            error = (parameter.grad.full_tensor() - right).abs().max() / right.abs().max()
            worst = max(worst, float(error))
        else:
            assert parameter.grad is None
    return {
        "frozen": {p.dtype for n, p in model.named_parameters() if trained not in n},
        "trained": {p.dtype for n, p in model.named_parameters() if trained in n},
        "held": held,
        "gathered": sum(sent.gathered),
        "scattered": sum(sent.scattered),
        "worst": worst,
    }


NORMS = 4 * 7 * DIM  # bytes of all norms in fp32, in which gradients are summed


@pytest.mark.parametrize(("ranks", "precision"), [(1, "fp32"), (1, "bf16"), (2, "fp32")])
@pytest.mark.parametrize("trained", ["norm", "layers.1.mlp"])
def test_F113_a_frozen_base_keeps_its_dtype_and_sends_no_gradients(
    ranks: int, precision: str, trained: str
) -> None:
    for found in run_on_ranks(ranks, on_a_frozen_base, precision, trained):
        assert found["frozen"] == {torch.bfloat16}
        assert found["trained"] == {torch.float32}
        learns = NORMS if trained == "norm" else 4 * 3 * 48 * DIM
        assert found["scattered"] == (learns if ranks > 1 else 0)
        assert found["worst"] < (1e-5 if precision == "fp32" else 5e-2)
        if ranks == 1:  # no copy of the base is kept from the forward to the backward
            assert not [n for n in found["held"] if "layers.0" in n or "layers.2" in n]
