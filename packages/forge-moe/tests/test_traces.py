"""Routing traces: what is written is read, and damage is found."""

import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from forge_moe import MoE, MoEConfig, recompute_contexts
from forge_moe.traces import TraceWriter, read_trace, trace_routes, traced_layers
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

LAYERS = {"layers.0": 8, "layers.3": 300}


def record(number: int, num_tokens: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(number)
    layer, num_experts = list(LAYERS.items())[number % 2]
    shape = (num_tokens, 2 + number % 2)
    return {
        "step": number // 2 + 2**40,
        "layer": layer,
        "ids": torch.randint(0, num_experts + 1, shape, generator=generator),
        "weights": torch.rand(shape, generator=generator),
        "token_ids": torch.randint(0, 200_000, (num_tokens,), generator=generator),
    }


def write(path: Path, **options: bool) -> list[dict[str, object]]:
    records = [record(i, num_tokens) for i, num_tokens in enumerate((5, 7, 0, 1))]
    for one in records:
        for key in ("weights", "token_ids"):
            if not options.get(key):
                one[key] = None
    with TraceWriter(path, LAYERS, **options) as trace:
        for one in records:
            trace.write(**one)
    return records


@pytest.mark.parametrize("options", [{}, {"weights": True}, {"weights": True, "token_ids": True}])
def test_what_is_written_is_read(tmp_path: Path, options: dict[str, bool]) -> None:
    wanted = write(tmp_path / "trace", **options)
    found = list(read_trace(tmp_path / "trace"))
    assert len(found) == len(wanted)
    for got, want in zip(found, wanted):
        assert (got.step, got.layer) == (want["step"], want["layer"])
        for key in ("ids", "weights", "token_ids"):
            a, b = getattr(got, key), want[key]
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)


def test_a_record_has_the_documented_size(tmp_path: Path) -> None:
    write(tmp_path / "small", weights=True, token_ids=True)
    empty = tmp_path / "empty"
    TraceWriter(empty, LAYERS, weights=True, token_ids=True).close()
    records = [(5, 2), (7, 3), (0, 2), (1, 3)]
    wanted = sum(24 + t * k * (2 + 4) + 4 * t for t, k in records)
    assert (tmp_path / "small").stat().st_size - empty.stat().st_size == wanted


@pytest.mark.parametrize("missing", [1, 15, 25])
def test_a_truncated_file_is_read_up_to_its_end(tmp_path: Path, missing: int) -> None:
    path = tmp_path / "trace"
    write(path)
    path.write_bytes(path.read_bytes()[:-missing])
    reader = read_trace(path)
    assert [len(next(reader).ids) for _ in range(3)] == [5, 7, 0]
    with rejects("records", 3, "truncated", where=path):
        next(reader)


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    write(path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with rejects("record", 3, "damaged", where=path):
        list(read_trace(path))


def test_another_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"hello, this is not a trace")
    with rejects("", ..., "format", where=tmp_path / "x"):
        list(read_trace(tmp_path / "x"))
    (tmp_path / "y").write_bytes(b"FMOETRC1" + struct.pack("<I", 4) + b"{...")
    with rejects("header", ..., "damaged", where=tmp_path / "y"):
        list(read_trace(tmp_path / "y"))


def test_mismatched_inputs_are_rejected(tmp_path: Path) -> None:
    with rejects("num_experts", 32767, "range", where="a"):
        TraceWriter(tmp_path / "big", {"a": 32767})
    with TraceWriter(tmp_path / "trace", LAYERS) as trace:
        with rejects("ids", (9, 9), "range", where="layers.0"):
            trace.write(0, "layers.0", torch.full((4, 2), 9))
        with rejects("weights, token_ids", (True, False), "header", where="layers.0"):
            trace.write(0, "layers.0", torch.zeros(4, 2).long(), torch.zeros(4, 2))
    with (
        TraceWriter(tmp_path / "weights", LAYERS, weights=True) as trace,
        rejects("weights", (4, 1), "shape", where="layers.0"),
    ):
        trace.write(0, "layers.0", torch.zeros(4, 2).long(), torch.zeros(4, 1))
    with (
        TraceWriter(tmp_path / "tokens", LAYERS, token_ids=True) as trace,
        rejects("token_ids", 3, "length", where="layers.0"),
    ):
        trace.write(0, "layers.0", torch.zeros(4, 2).long(), token_ids=torch.zeros(3))
    with pytest.raises(FileExistsError, match=str(tmp_path / "trace")):
        TraceWriter(tmp_path / "trace", LAYERS)


@pytest.mark.parametrize("recorded", [True, False])
def test_the_routes_of_a_model_are_written_once_also_under_recomputation(
    tmp_path: Path, recorded: bool
) -> None:
    model = nn.ModuleList(
        MoE(MoEConfig(dim=8, hidden_dim=8, num_experts=n, top_k=2, router=router))
        for n, router in ((4, "softmax_topk"), (6, "expert_choice"))
    )
    options = {"context_fn": recompute_contexts} if recorded else {}
    x = torch.randn(2, 5, 8, requires_grad=True)
    ctx = SimpleNamespace(token_ids=torch.arange(10).view(2, 5), valid=None, document_ids=None)
    with (
        TraceWriter(
            tmp_path / "trace", traced_layers(model), weights=True, token_ids=True
        ) as writer,
        trace_routes(model, writer, step=lambda: 7),
    ):
        y = x
        for layer in model:
            y = checkpoint(layer, y, ctx, use_reentrant=False, **options)
        y.sum().backward()
    model[0](x)  # no longer traced
    records = list(read_trace(tmp_path / "trace"))
    assert [(r.step, r.layer) for r in records] == [(7, "0"), (7, "1")]
    weights, ids = model[0].router(x.detach().flatten(0, 1))
    assert torch.equal(records[0].ids, ids)
    assert torch.equal(records[0].weights, weights.detach())
    assert torch.equal(records[0].token_ids, torch.arange(10))
    assert "route" not in vars(model[0].router)


def test_a_replay_outside_a_backward_is_not_written(tmp_path: Path) -> None:
    moe = MoE(MoEConfig(dim=8, hidden_dim=8, num_experts=4))
    record, replay = recompute_contexts()
    x = torch.randn(5, 8)
    with (
        TraceWriter(tmp_path / "trace", traced_layers(moe)) as writer,
        trace_routes(moe, writer, step=lambda: 0),
    ):
        for context in (record, replay, replay):
            with context:
                moe(x)
    assert len(list(read_trace(tmp_path / "trace"))) == 1
