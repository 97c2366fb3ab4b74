"""Places of training that were slow on GPUs: counts before, now, their bounds, and those of peers.

    python -m tests.null_gpu.compared_places        # the places that no step of sizes.py has, as JSON; on the null GPU

Shapes: T tokens, D width, K slots per token, E experts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from tests.null_gpu.places import BF16, fused_loss, made, measure, norm, window
from tests.null_gpu.tally import Tally

from forge_core import Transformer, TransformerConfig
from forge_core.model import MLAConfig
from forge_core.model.attention_ops import AttentionSpec, attend_sequences
from forge_moe import MoE
from forge_moe.dispatch.local import Permutation

T, D, K = 8192, 2048, 8


def permuted() -> tuple[Permutation, torch.Tensor]:
    order = Permutation.local(torch.zeros(T, K, dtype=torch.int64, device="cuda"))
    return order, made(T, D)


def permute() -> Callable[[], object]:
    order, x = permuted()
    return lambda: order.permute(x)


def permute_backward() -> Callable[[], object]:
    order, x = permuted()
    return backward_of(order.permute(x), x)


def combine() -> Callable[[], object]:
    order, _ = permuted()
    rows, weights = made(T * K, D), made(T, K, dtype=torch.float32)
    return lambda: order.unpermute(rows, weights)


def combine_backward() -> Callable[[], object]:
    order, _ = permuted()
    rows, weights = made(T * K, D), made(T, K, dtype=torch.float32)
    return backward_of(order.unpermute(rows, weights), rows, weights)


def backward_of(out: torch.Tensor, *inputs: torch.Tensor) -> Callable[[], object]:
    grad = torch.empty_like(out)
    return lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)


def experts(backend: str = "auto") -> Callable[[], object]:
    """A layer of 8 experts of Mixtral's size, 8,192 tokens, its matrices in bf16."""
    with torch.device("meta"):
        layer = MoE(dim=4096, hidden_dim=14336, num_experts=8, top_k=2, backend=backend)
    layer.experts.to(BF16)
    layer.to_empty(device="cuda")
    x = made(1, T, 4096)
    inputs = [x, *layer.parameters()]

    def run() -> object:
        y = layer(x)
        return torch.autograd.grad(y, inputs, torch.empty_like(y))

    return run


def experts_float8() -> Callable[[], object]:
    return experts("float8")


def sinks() -> Callable[[], object]:
    """Attention of gpt-oss, 8,192 tokens: 64 heads over 8, of width 64, with a sink for each."""
    q, k, v = (made(1, 8192, heads, 64) for heads in (64, 8, 8))
    each = made(64, dtype=torch.float32)

    def run() -> object:
        out = attend_sequences(q, k, v, AttentionSpec(sinks=True), each)
        return torch.autograd.grad(out, (q, k, v, each), torch.empty_like(out))

    return run


def mla() -> Callable[[], object]:
    """One layer of DeepSeek's attention, 4,096 tokens: heads of 192, values of 128."""
    widths = MLAConfig(
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )
    config = TransformerConfig(
        vocab_size=1024,
        dim=2048,
        num_layers=1,
        num_heads=16,
        mixer="mla",
        mla=widths,
        hidden_dim=1024,
    )
    with torch.device("meta"):
        model = Transformer(config)
    model.to_empty(device="cuda").to(BF16)
    tokens = torch.zeros(1, 4096, dtype=torch.int64, device="cuda")
    return lambda: torch.autograd.grad(model(tokens).sum(), list(model.parameters()))


PLACES = (
    norm, window, fused_loss, permute, permute_backward, combine, combine_backward, experts, experts_float8, sinks, mla,
)  # fmt: skip


def counted_place(make: Callable[[], Callable[[], object]]) -> dict[str, Any]:
    """As `measure`, with bytes, the largest tensor, and calls that pad."""
    found: dict[str, Any] = dict(measure(make))
    torch.cuda.empty_cache()
    run = make()
    run()
    with Tally() as tally:
        run()
    pads = sum(calls for name, calls in tally.calls.items() if "pad" in name)
    return found | {"bytes": tally.bytes(), "largest": tally.largest[0], "pads": pads}


class Row(NamedTuple):
    """A line of the table; `now` reads it from the counts of steps and of places."""

    place: str
    before: str
    now: Callable[[Mapping[str, Any], Mapping[str, Any]], str]
    bound: str
    peers: Callable[[Mapping[str, Any]], str] = lambda steps: ""


def gb(*numbers: float) -> str:
    return " / ".join(f"{number / 1e9:,.2f}" for number in numbers)


def units(step: Mapping[str, Any]) -> str:
    root = f"{step['root_unit'] / 1e6:,.2f} MB"
    return (
        f"{root} / {gb(step['largest_unit'], step['most_unit_bytes'], step['gathered_bytes'])} GB"
    )


def per_element(places: Mapping[str, Any]) -> str:
    names = ("permute", "permute_backward", "combine", "combine_backward")
    return ", ".join(f"{places[name]['bytes'] / (T * D):.0f}" for name in names)


def a_layer(steps: Mapping[str, Any], many: str, layers: int, few: str) -> int:
    """Kernels of a layer, from two models of different depth."""
    difference: int = steps[many]["kernels"] - steps[few]["kernels"]
    return round(difference / (layers - 2))


def of_peer(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda steps: (
        f"transformers {steps[name]['kernels']:,}; torchtitan 0.3.0 2,347" if name in steps else ""
    )


ROWS = (
    Row("8B over 8 ranks: the root's unit / largest unit, alive, gathered in all",
        "2.10 GB / 2.10 / 2.97 / 30.0 GB", lambda s, p: units(s["dense 8B"]), "1 MB / 1.06 / 1.5 / 30.1 GB",
        lambda s: units(s["dense 8B of transformers"]) if "dense 8B of transformers" in s else ""),
    Row("the same step: kernels", "2,828", lambda s, p: f"{s['dense 8B']['kernels']:,}", "2,450",
        of_peer("dense 8B of transformers")),
    Row("fused loss, 16,384 tokens of 128,256 ids: matmuls, kernels, GB moved", "8,320, 17,430, 1,200",
        lambda s, p: f"{p['fused_loss']['matmuls']}, {p['fused_loss']['kernels']}, {gb(p['fused_loss']['bytes'])}",
        "64, 250", lambda s: "`F.linear_cross_entropy` in chunks 40, 170"),
    Row("MoE, K = 8, bytes per element of (T, D): permute, its backward, combine, its backward", "18, 18, 132, 324",
        lambda s, p: per_element(p), "20, 20, 24, 48"),
    Row("MoE layer of 64 experts, EP 8: kernels", "391",
        lambda s, p: f"{a_layer(s, 'moe 64, EP 8', 28, 'moe 64, EP 8, 2 layers')}", "300"),
    Row("the same: FSDP units alive besides the root, of all", "7 of 8",
        lambda s, p: f"{s['moe 64, EP 8']['most_units'] - 1} of {s['moe 64, EP 8']['units']}", "3"),
    Row("window of 4,096, a row of 8,192 tokens: largest tensor, peak of attention, GB", "4.3, 17.9",
        lambda s, p: f"{gb(p['window']['largest'])}, {p['window']['peak'] / 1e3:.2f}", "as packed rows"),
    Row("gpt-oss attention, 8,192 tokens: largest tensor, GB", "17.2", lambda s, p: gb(p["sinks"]["largest"]),
        "no tensor of (H, S, S)"),
    Row("latent attention 192 / 128: calls that pad", "3", lambda s, p: str(p["mla"]["pads"]), "0 where a kernel takes it"),
    Row("selective recomputation, 2 layers: flash forwards under CP 2; exchanges under EP 8", "6 (3 without); 7 (5)",
        lambda s, p: "{} ({} without); {} ({})".format(
            *(s[f"1b, CP 2{mode}"]["flash"] for mode in (", selective", "")),
            *(s[f"moe 8, EP 8, 2 layers{mode}"]["exchanges"] for mode in (", selective", ""))),
        "as without"),
    Row("bf16 moments, 8B over 8: kernels a step", "39,292", lambda s, p: f"{s['dense 8B, bf16 moments']['kernels']:,}, {s['dense 8B, bf16 moments']['kernels'] - s['dense 8B']['kernels']} more than with fp32",
        "700 more"),
    Row("Gemma's norm, forward and backward: kernels", "24", lambda s, p: str(p["norm"]["kernels"]), "6",
        lambda s: "RMSNorm of torch 3"),
    Row("layer of 8 experts in float8: GB moved (bf16)", "124 (29)",
        lambda s, p: f"{gb(p['experts_float8']['bytes'])} ({gb(p['experts']['bytes'])})", "45"),
    Row("graph breaks of compiled blocks", "unknown", lambda s, p: "listed in internals/forge-parallel.md", "listed"),
    Row("kernels of context parallelism", "private signatures by position",
        lambda s, p: "by name, packages/forge-parallel/src/forge_parallel/_torch_compat.py", "by name"),
    Row("initial values of 8B", "each rank draws all, on the CPU",
        lambda s, p: "a rank draws its shard, on its device (tests/parallel/test_units.py)", "its shard"),
)  # fmt: skip


def lines(steps: Mapping[str, Any], places: Mapping[str, Any]) -> Iterator[str]:
    """Markdown of the table."""
    yield "| place | before | now | bound | peers |"
    yield "|---|---|---|---|---|"
    for row in ROWS:
        try:
            now = row.now(steps, places)
        except KeyError:
            now = "not counted yet"
        yield f"| {row.place} | {row.before} | {now} | {row.bound} | {row.peers(steps)} |"


if __name__ == "__main__":
    print(json.dumps({place.__name__: counted_place(place) for place in PLACES}), flush=True)
