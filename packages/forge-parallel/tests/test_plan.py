"""What a plan says of memory, traffic and places is so."""

from __future__ import annotations

import importlib
import re
import time
from dataclasses import replace
from statistics import mean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plan_models import Llama, on_meta
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from forge_parallel import ParallelConfig, make_meshes, parallelize
from forge_parallel._shared import cross_entropy
from forge_parallel._shared.problems import Problem
from forge_parallel.axes.tensor import tensor_parallel
from forge_parallel.config import Layout
from forge_parallel.plan import (
    Candidate,
    Estimate,
    Profile,
    SearchSpace,
    Storage,
    Topology,
    auto_layout,
    estimate_layout,
    find_hardware,
    find_nodes,
    memory,
    render,
    score,
    search,
)
from forge_parallel.plan.candidate import describe
from forge_parallel.plan.memory import Memory, local_numel, micro_batches_in_flight
from forge_parallel.plan.trace import trace
from forge_testing import device, run_on_ranks
from forge_testing.live_bytes import LiveBytes
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

SEQ, H200 = 64, find_hardware("h200")
SIZES_70B = {
    "dim": 8192,
    "layers": 80,
    "heads": 64,
    "kv_heads": 8,
    "hidden": 28672,
    "vocab": 128256,
}


def candidate_of(
    model: nn.Module, world: int, batch: int = 32, micro: int = 1, **options: Any
) -> Candidate:
    config = ParallelConfig(device=device().type, **options)
    return Candidate(Profile(model, SEQ), config, world, batch, micro, H200, 8, Storage())


class Saved:
    """Bytes of the storages that autograd keeps, but those of parameters."""

    def __init__(self, model: nn.Module) -> None:
        locals_ = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
        self.parameters = {p.untyped_storage().data_ptr() for p in locals_}
        self.found: dict[int, Any] = {}

    def __enter__(self) -> Saved:
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.hooks.__exit__(*error)

    def _pack(self, tensor: Any) -> Any:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.untyped_storage().data_ptr() not in self.parameters:
            self.found[local.untyped_storage().data_ptr()] = local
        return tensor

    @property
    def bytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self.found.values())


def saved_bytes(profile: Profile, found: Any) -> int:
    blocks = sum(found.kinds[k].saved for k in profile.order)
    return int(found.first.saved + found.last.saved + found.shared + blocks)


@pytest.mark.lane("quick")
def test_the_gpus_of_a_node_follow_from_their_numbers() -> None:
    assert find_nodes("H200", 16) == (H200, 8)
    assert find_nodes("h200", 4) == (H200, 4), "a node has no more than there are"
    assert find_nodes("h200", 16, gpus_per_node=4) == (H200, 4)
    assert find_nodes("h200", 16, nodes=8, gpus_per_node=4) == (H200, 2)
    with rejects("gpus", 0, "range"):
        find_nodes("h200", 0)
    with rejects("nodes", 3, "divides"):
        find_nodes("h200", 8, 3)
    with rejects("gpu", "h999", "unknown"):
        find_nodes("h999", 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_what_a_real_forward_keeps(dtype: torch.dtype) -> None:
    """In fp32 with a key of its own for each head: a CPU shares heads there, a GPU's kernels do not."""
    heads = {} if dtype == torch.bfloat16 else {"kv_heads": 4}
    profile = Profile(on_meta(**heads), SEQ)
    model = Llama(**heads).to(dtype)
    with Saved(model) as saved:
        model(torch.zeros(3, SEQ, dtype=torch.int64, device=device()))
    assert saved_bytes(profile, trace(profile, dtype=dtype, rows=3)) == pytest.approx(
        saved.bytes, rel=0.01
    )


def _saved_under_tp(sequence_parallel: bool) -> int:
    config = ParallelConfig(
        device=device().type, precision="fp32", tp=2, sequence_parallel=sequence_parallel
    )
    torch.manual_seed(0)
    model = parallelize(Llama(), config, make_meshes(config))
    gathered: set[int] = set()  # FSDP's weights are not activations

    def note(module: nn.Module, *_: Any) -> None:
        gathered.update(t.untyped_storage().data_ptr() for t in _whole(module))

    for module in model.modules():
        module.register_forward_pre_hook(note)
    with Saved(model) as saved:
        model(torch.zeros(2, SEQ, dtype=torch.int64, device=device()))
    return sum(
        t.untyped_storage().nbytes() for key, t in saved.found.items() if key not in gathered
    )


def _whole(module: nn.Module) -> list[torch.Tensor]:
    found = [p for p in module._parameters.values() if p is not None]
    return [p.to_local() if hasattr(p, "to_local") else p for p in found]


@pytest.mark.lane("quick")
@pytest.mark.distributed
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_activations_under_tensor_parallelism(sequence_parallel: bool) -> None:
    profile = Profile(on_meta(), SEQ)
    found = trace(profile, tp=2, sequence_parallel=sequence_parallel, dtype=torch.float32, rows=2)
    for measured in run_on_ranks(2, _saved_under_tp, sequence_parallel):
        assert saved_bytes(profile, found) == pytest.approx(measured, rel=0.1)


def _shards(options: dict[str, Any], sizes: dict[str, int]) -> dict[str, int]:
    config = ParallelConfig(device=device().type, **options)
    model = parallelize(on_meta(**sizes), config, make_meshes(config))
    return {n: p.to_local().numel() for n, p in model.named_parameters()}


@pytest.mark.lane("quick")
@pytest.mark.distributed
@pytest.mark.parametrize(
    "options", [{}, {"tp": 2}, {"dp_replicate": 2}, {"pp": 2}, {"pp": 2, "tp": 2}], ids=str
)
def test_parameters_of_the_first_rank_are_exact(options: dict[str, Any]) -> None:
    assert _planned(4, options, {"vocab": 93}) == _found(4, options, {"vocab": 93})


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("vocab", [97, 99])
def test_parameters_are_exact_for_tables_that_are_sharded_by_width_and_by_ids(vocab: int) -> None:
    sizes = {"vocab": vocab, "dim": 48}
    assert _planned(6, {"tp": 2}, sizes) == _found(6, {"tp": 2}, sizes)


def _planned(world: int, options: dict[str, Any], sizes: dict[str, int]) -> int:
    candidate = candidate_of(on_meta(**sizes), world, **options)
    return sum(
        local_numel(p, candidate) for group in candidate.load(0).groups for p in group.params
    )


def _found(world: int, options: dict[str, Any], sizes: dict[str, int]) -> int:
    return sum(run_on_ranks(world, _shards, options, sizes)[0].values())


@pytest.mark.lane("quick")
def test_a_copy_less_recomputed_and_a_row_less_kept() -> None:
    def activations(**options: Any) -> float:
        return plan(on_meta(), 4, **options).memory[0].activations

    none, selective, full = (activations(recompute=m) for m in ("none", "selective", "full"))
    assert full < selective < none
    assert full < activations(recompute="full", recompute_every=2) < none
    assert activations(micro_batch=2) == pytest.approx(2 * none)
    halves = activations(tp=2), activations(cp=2)
    assert all(0.45 * none < half < 0.62 * none for half in halves)


def plan(
    model: nn.Module, world: int, batch: int = 32, micro_batch: int = 1, **options: Any
) -> Estimate:
    config = ParallelConfig(device=device().type, **options)
    return estimate_layout(
        model, config, world, global_batch=batch, micro_batch=micro_batch, seq_len=SEQ
    )


def test_gradients_of_casts_wait_for_the_end_of_the_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Few tokens, so that weights are most of it: what the second micro-batch of one process holds at its peak."""
    monkeypatch.setattr(memory, "_LIBRARIES", 0.0)
    config = ParallelConfig(device="cpu", recompute="none")
    candidate = Candidate(Profile(on_meta(hidden=512), 8), config, 1, 2, 1, H200, 8, Storage())
    planned = memory.stage_memory(candidate, 0)
    stored = planned.weights + planned.gradients + planned.moments

    model = parallelize(Llama(hidden=512), config, make_meshes(config))
    tokens = torch.randint(96, (1, 8))
    model(tokens).sum().backward()
    with LiveBytes() as live:
        model(tokens).sum().backward()
    assert 0.98 <= (planned.peak - stored) / live.peak <= 1.05


@pytest.mark.parametrize("sequences", [1, 4], ids=["one block", "blocks"])
def test_a_fused_loss_holds_a_block_of_logits(
    sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab, rows = 512, 16
    monkeypatch.setattr(cross_entropy, "_BLOCK_CPU", rows * vocab)
    for module in (cross_entropy, memory):
        monkeypatch.setattr(module, "block_size", lambda *_: 2 * SEQ)
    config = ParallelConfig(device="cpu")
    storage = Storage(fused_loss=True, workspace=rows * vocab * 8)
    profile = Profile(on_meta(vocab=vocab), SEQ)
    candidate = Candidate(profile, config, 1, 8, sequences, H200, 8, storage)

    shapes = ((sequences * SEQ, 64), (vocab, 64))
    x, weight = (torch.randn(*shape).bfloat16().requires_grad_() for shape in shapes)
    labels = torch.randint(vocab, x.shape[:1])
    flat = cross_entropy.Labels.of(labels, None, -100, vocab, torch.float32)
    terms = cross_entropy.Vocab.of(vocab, 0.0, 0.0), cross_entropy.Head.of(1.0, None)
    with LiveBytes() as live:
        cross_entropy.loss_of_hidden(x, weight, flat, labels.shape, *terms).sum.backward()
    assert 0.95 <= memory.stage_memory(candidate, 0).loss / live.peak <= 1.02


@pytest.mark.parametrize(
    ("schedule", "batches", "first", "last"),
    [("gpipe", 8, 8, 8), ("1f1b", 8, 4, 1), ("interleaved_1f1b", 8, 5.5, 2.5), ("zbv_zero_bubble", 8, 4, 4),
     ("dualpipev", 8, 4.5, 4.5)],
)  # fmt: skip
def test_micro_batches_in_flight(schedule: str, batches: int, first: float, last: float) -> None:
    candidate = candidate_of(on_meta(layers=8), 4, batch=batches, pp=4, pp_schedule=schedule)
    assert mean(micro_batches_in_flight(candidate, 0)) == first
    assert mean(micro_batches_in_flight(candidate, 3)) == last


@pytest.mark.lane("quick")
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("schedule", "table"),
    [("zbv_zero_bubble", "ScheduleZBVZeroBubble"), ("dualpipev", "ScheduleDualPipeV")],
)
def test_micro_batches_in_a_v_are_those_of_torchs_tables(
    schedule: str, table: str, pp: int
) -> None:
    """Of each stage, at the last of the moments in which a rank keeps most of them."""
    for rank in range(pp):
        candidate = candidate_of(
            on_meta(layers=2 * pp), pp, batch=4 * pp, pp=pp, pp_schedule=schedule
        )
        assert tuple(micro_batches_in_flight(candidate, rank)) == _most_kept(
            table, pp, rank, 4 * pp
        )


def _most_kept(table: str, pp: int, rank: int, count: int) -> tuple[int, int]:
    schedules = importlib.import_module("torch.distributed.pipelining.schedules")
    owners = {stage: min(stage, 2 * pp - 1 - stage) for stage in range(2 * pp)}
    facts = SimpleNamespace(
        pp_group_size=pp, _n_microbatches=count, n_local_stages=2, rank=rank,
        _num_stages=2 * pp, num_stages=2 * pp, stage_index_to_group_rank=owners,
    )  # fmt: skip
    kept: set[tuple[int, int]] = set()
    most = (0, 0)
    for action in getattr(schedules, table)._calculate_single_rank_operations(facts, rank):
        for part in getattr(action, "sub_actions", None) or [action] * (action is not None):
            key, kind = (part.stage_index, part.microbatch_index), part.computation_type.name
            if kind == "FORWARD":
                kept.add(key)
            elif kind in ("FULL_BACKWARD", "BACKWARD_WEIGHT"):  # between halves all is kept
                kept.discard(key)
            first = sum(stage == rank for stage, _ in kept)
            most = max(most, (first, len(kept) - first), key=lambda both: (sum(both), both[1]))
    return most


@pytest.mark.lane("quick")
def test_traffic_of_fsdp_and_hsdp() -> None:
    model = on_meta()
    numel = sum(p.numel() for p in model.parameters())
    blocks = sum(p.numel() for b in model.blocks() for p in b.parameters())
    (fsdp,) = plan(model, 4, batch=8, micro_batch=2).traffic
    # bf16 weights gathered twice in blocks, once outside; fp32 gradients scattered once
    assert fsdp.whole == blocks * (2 * 2 + 4) + (numel - blocks) * (2 + 4)
    assert fsdp.received == fsdp.whole * 3 / 4
    found = {t.axis: t for t in plan(model, 4, batch=8, micro_batch=1, dp_replicate=2).traffic}
    assert found["fsdp"].whole == 2 * fsdp.whole  # two micro-batches
    assert found["dp_replicate"].whole == numel / 2 * 4 * 2  # its shard, there and back, once


class WithEnds(Llama):
    """A model that returns its embedding and head, which FSDP2 then wraps by themselves."""

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head


@pytest.mark.lane("quick")
def test_ends_that_are_units_are_not_gathered_while_blocks_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def planned(model: type[nn.Module], least: int, tied: bool = False, **options: Any) -> Memory:
        monkeypatch.setattr(memory, "OWN_UNIT", least)
        with torch.device("meta"):
            found: Any = model()
        if tied:
            found.head.weight = found.embedding.weight
        return plan(found, 4, **options).memory[0]

    table = 96 * 64 * 2  # bf16
    in_root, units = (planned(WithEnds, least) for least in (2**24, 1))
    # less two tables; more by the fp32 input of the reduce-scatter of the head, in place of its bf16 gradient
    assert in_root.gathered - units.gathered == 2 * table - table
    assert units.peak < in_root.peak

    for same in (
        (Llama, 2**24), (Llama, 1),
        (WithEnds, 2**24),
    ):  # fmt: skip
        assert planned(*same) == in_root
    assert planned(WithEnds, 1, tied=True) == planned(WithEnds, 2**24, tied=True)
    kept = {"reshard_after_forward": False}
    assert planned(WithEnds, 1, **kept) == planned(WithEnds, 2**24, **kept)


def test_traffic_of_tensor_parallelism_is_four_streams_a_block() -> None:
    stream = 2 * SEQ * 64 * 2  # rows, tokens, width, bytes
    for sequence_parallel in (True, False):
        given = plan(
            on_meta(), 2, batch=2, micro_batch=2, tp=2, sequence_parallel=sequence_parallel
        )
        (tp,) = [t for t in given.traffic if t.axis == "tp"]
        # forward and backward: 4 blocks of two gathers and two scatters, the embedding's and the head's
        assert tp.whole == 2 * (4 * 4 + 2) * stream


def test_ranks_on_nodes_of_four_and_eight() -> None:
    layout = Layout(pp=2, dp_replicate=2, dp_shard=2, cp=1, tp=4, ep=1)
    eight, four = Topology(layout, 8), Topology(layout, 4)
    assert (eight.nodes, four.nodes) == (4, 8)
    assert [eight.crosses(a) for a in ("tp", "fsdp", "dp_replicate", "pp")] == [
        False,
        False,
        True,
        True,
    ]
    assert [four.crosses(a) for a in ("tp", "fsdp", "dp_replicate", "pp")] == [
        False,
        True,
        True,
        True,
    ]
    assert eight.placement(experts=False)[1].startswith("fsdp 2: ranks 0, 4;")
    assert four.seconds("fsdp", 1e9, H200) > 5 * eight.seconds("fsdp", 1e9, H200)


@pytest.mark.parametrize(
    ("options", "key", "value", "code"),
    [
        ({"tp": 4}, "layers.0.attention.k_proj", 32, "divides"),
        ({"cp": 2, "tp": 2, "seq": 6}, "seq_len", 6, "divides"),
        ({"pp": 8}, "num_layers", 4, "stages"),
        ({"ep": 2}, "ep", 2, "divides"),
        ({"batch": 25, "micro_batch": 2}, "micro_batch", 2, "divides"),
    ],
    ids=str,
)
def test_a_model_that_does_not_fit_raises(
    options: dict[str, Any], key: str, value: object, code: str
) -> None:
    sizes = {k: options.pop(k, v) for k, v in (("batch", 16), ("micro_batch", 1), ("seq", SEQ))}
    with rejects(key, value, code):
        estimate_layout(on_meta(), ParallelConfig(**options), 8, global_batch=sizes["batch"],
                  micro_batch=sizes["micro_batch"], seq_len=sizes["seq"])  # fmt: skip


def test_a_model_without_parts_is_planned_without_a_pipeline() -> None:
    model: Any = on_meta()
    model.pipeline_parts = None
    with rejects("pipeline_parts", ..., "missing", where="Llama"):
        plan(model, 4, pp=2)
    found = search(SearchSpace(Profile(model, SEQ), ParallelConfig(), 4, 32, H200, 4))
    assert {c.candidate.layout.pp for c in found} == {1}


def test_a_shard_of_a_layer_must_be_the_multiple_of_its_role() -> None:
    model: Any = on_meta()
    roles = model.parallel_roles() | {
        "layers.*.gate_proj.*": {"role": "colwise", "multiple_of": 160}
    }
    model.parallel_roles = lambda: roles
    (problem,) = Profile(model, SEQ).tp_problems(2)
    assert (problem.key.rpartition(".")[2], problem.code) == ("gate_proj", "divides")


def test_tp_leaves_its_node_only_if_allowed() -> None:
    with rejects("tp", 16, "node"):
        plan(on_meta(heads=16, kv_heads=16), 16, tp=16)
    plan(on_meta(heads=16, kv_heads=16), 16, batch=1, tp=16, across_nodes=True)


def test_layouts_that_the_caller_rejects_are_no_candidates() -> None:
    """A runner has rules of its own, of models that it knows."""
    model = on_meta()
    space = SearchSpace(Profile(model, SEQ), ParallelConfig(), 4, 32, H200, 4)
    assert {c.candidate.layout.tp for c in search(space)} > {1}
    problem = Problem("tp", "own", 2, "is too large")
    own = replace(space, refuses=lambda config: [problem] if config.tp > 1 else [])
    assert {c.candidate.layout.tp for c in search(own)} == {1}
    with rejects("tp", 2, "own"):
        own.candidate(ParallelConfig(tp=2), None)


@pytest.mark.slow
def test_a_70b_on_256_gpus_is_searched_quickly_with_reasons() -> None:
    started = time.perf_counter()
    profile = Profile(on_meta(**SIZES_70B), 4096)
    space = SearchSpace(
        profile, ParallelConfig(compile=True), 256, 512, H200, 8, micro_batches=(1, 2)
    )
    best, reasons = auto_layout(space)
    assert time.perf_counter() - started < 60
    assert best.fits
    assert best.candidate.layout.tp <= 8
    assert reasons[0].startswith(describe(best.candidate))
    text = render(estimate_layout(profile, best.candidate.config, 256, global_batch=512,
                            micro_batch=best.candidate.micro_batch, gpus_per_node=8), [best])  # fmt: skip
    assert {"70.55", "256", "h200", "32", "8"} <= set(re.findall(r"\w[\w.]*\w|\w", text))
    assert "fits" in text


def test_the_choice_is_the_same_each_time_and_nothing_better_is_left() -> None:
    space = SearchSpace(
        Profile(on_meta(), SEQ), ParallelConfig(), 8, 32, H200, 8, micro_batches=(1, 2, 4)
    )
    ranked = search(space)
    assert score(ranked[0]) == max(score(c) for c in ranked if c.fits)
    assert (
        auto_layout(space)[0].candidate.config
        == auto_layout(space)[0].candidate.config
        == ranked[0].candidate.config
    )


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_too_little_memory_names_the_smallest_layout() -> None:
    profile = Profile(on_meta(**SIZES_70B), 4096)
    space = SearchSpace(profile, ParallelConfig(), 4, 64, H200, 4, micro_batches=(1,))
    with rejects("world_size", 4, "memory") as caught:
        auto_layout(space)
    assert {"h200", "70.6", "120"} <= set(str(caught.value).split())


class Sent(TorchDispatchMode):
    """Unsharded bytes of collectives; an all-reduce counts as a reduce-scatter and an all-gather."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        if op.namespace == "_c10d_functional" and "wait" not in str(op):
            passes = 2 if "all_reduce" in str(op) else 1
            self.bytes += passes * max(t.numel() * t.element_size() for t in (args[0], out))
        return out


def sent_over_tp(sequence_parallel: bool) -> int:
    config = ParallelConfig(device=device().type, precision="fp32", tp=2)
    model = Llama()
    tensor_parallel(model, make_meshes(config).dense["tp"], sequence_parallel=sequence_parallel)
    with Sent() as sent:
        model(torch.zeros(3, SEQ, dtype=torch.int64, device=device())).square().sum().backward()
    return sent.bytes


@pytest.mark.lane("quick")
@pytest.mark.distributed
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_tp_sends_in_ranks_what_the_trace_counts(sequence_parallel: bool) -> None:
    """The trace puts its own tensors in the place of collectives: these are the real ones."""
    profile = Profile(Llama(), SEQ)
    found = trace(profile, 2, 1, sequence_parallel, torch.float32, rows=3)
    blocks = sum(found.kinds[kind].sent["tp"] for kind in profile.order)
    forward = blocks + found.first.sent["tp"] + found.last.sent["tp"]
    assert run_on_ranks(2, sent_over_tp, sequence_parallel) == [2 * forward] * 2
