"""Tensor parallelism of plain models computes what one process computes."""

from __future__ import annotations

import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tensor_models import Model, batch, copy_of, errors, mesh_of, one_process, seeded, shard
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Partial, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from forge_parallel.axes.local import use_local
from forge_parallel.axes.tensor import gather_vocab, tensor_parallel
from forge_parallel.axes.vocab import vocab_cross_entropy
from forge_testing import device, run_on_ranks
from forge_testing.problems import assert_problem

pytestmark = pytest.mark.lane("test")


def _against_one_process(dp, tp, cases, compiled=False):
    mesh = mesh_of(dp, tp)
    axis = SimpleNamespace(group=mesh["tp"].get_group(), size=tp, rank=mesh["tp"].get_local_rank())
    found = []
    for options, sequence_parallel in cases:
        model = seeded(**options)
        reference = copy_of(model)
        tokens, labels, ctx = batch(2 * dp)
        want = one_process(reference, tokens, labels, ctx)
        tensor_parallel(model, mesh["tp"], sequence_parallel=sequence_parallel)
        for block in model.blocks() if compiled else ():
            block.compile(backend="aot_eager", fullgraph=True)
        everywhere = mesh._flatten("everywhere") if "r" in options["kinds"] else None
        shard(model, mesh["dp_shard"], everywhere)
        rows = slice(
            2 * mesh["dp_shard"].get_local_rank(), 2 * mesh["dp_shard"].get_local_rank() + 2
        )
        mine = type(ctx)(valid=ctx.valid[rows])
        total = vocab_cross_entropy(model(tokens[rows], mine), labels[rows], axis).sum
        loss = total / (labels != -100).sum()
        loss.backward()
        loss = loss.detach()
        dist.all_reduce(loss, group=mesh["dp_shard"].get_group())
        found.append(
            (
                float((loss - want).abs() / want),
                errors(model, reference),
                list(model.state_dict()) == list(reference.state_dict()),
            )
        )
    return found


CASES = [
    ({"kinds": kinds, "tied": tied}, sp)
    for kinds, tied in (("a", False), ("ao", True), ("ar", False))
    for sp in (False, True)
]


def _assert_equal(cases, ranks):
    for rank in ranks:
        for case, (loss, found, same_names) in zip(cases, rank, strict=True):
            worst = max(found, key=found.get)
            assert loss < 1e-5, case
            assert found[worst] < 1e-5, (case, worst, found[worst])
            assert same_names


@pytest.mark.slow
@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 2)])
def test_loss_and_every_gradient_equal_one_process(dp, tp):
    ranks = run_on_ranks(dp * tp, _against_one_process, dp, tp, CASES, timeout=120)
    _assert_equal(CASES, ranks)


@pytest.mark.lane("quick")
@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 2), (1, 4)])
def test_norms_over_all_heads_and_numbers_of_heads_equal_one_process(dp, tp):
    """With four ranks two share each key head, and its norm's weight."""
    cases = [({"kinds": "n", "tied": False}, sp) for sp in (False, True)]
    ranks = run_on_ranks(dp * tp, _against_one_process, dp, tp, cases, timeout=120)
    _assert_equal(cases, ranks)


@pytest.mark.slow
def test_compiled_blocks_equal_one_process():
    cases = [({"kinds": "a", "tied": True}, sp) for sp in (False, True)]
    ranks = run_on_ranks(2, _against_one_process, 1, 2, cases, True, timeout=200)
    _assert_equal(cases, ranks)


def _f07():
    mesh = mesh_of(1, 2)
    tokens, labels, _ = batch(2)
    found = {}
    for name, placements in (("summed", (Partial(),)), ("as it lies", None)):
        model = seeded(kinds="a")
        reference = copy_of(model)
        one_process(reference, tokens, labels)
        tensor_parallel(model, mesh["tp"], sequence_parallel=False)
        for norm in (model.layers[0].mixer.q_norm, model.layers[0].mixer.k_norm):
            use_local(norm, "weight", placements)
        shard(model, mesh["dp_shard"])
        loss = vocab_cross_entropy(model(tokens), labels, mesh["tp"])
        (loss.sum / loss.count).backward()
        found[name] = errors(model, reference)
    return found


@pytest.mark.lane("quick")
def test_F07_gradients_of_head_norms_are_summed_over_tensor_parallel_ranks():
    """Each rank's norms see its own heads: without the sum their gradients are a part."""
    norms = [f"layers.0.mixer.{name}_norm.weight" for name in "qk"]
    for rank in run_on_ranks(2, _f07):
        assert all(rank["summed"][name] < 1e-5 for name in norms)
        assert all(rank["as it lies"][name] > 0.05 for name in norms)


class Counted(TorchDispatchMode):
    """Counts collectives. (CommDebugMode hands every module copies, so that siblings share nothing.)"""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "_c10d_functional" and "wait" not in str(op):
            self.counts[op._schema.name.rpartition("::")[2]] += 1
        return op(*args, **(kwargs or {}))


def _collectives(sequence_parallel):
    mesh = mesh_of(1, 2)
    model = seeded(kinds="a")
    tensor_parallel(model, mesh["tp"], sequence_parallel=sequence_parallel)
    block = model.layers[0]
    x = torch.randn(2, 4 if sequence_parallel else 8, 16, requires_grad=True)
    with Counted() as forward:
        y = block(x)
    with Counted() as backward:
        y.sum().backward()
    return [dict(forward.counts), dict(backward.counts)]


def test_one_block_communicates_four_times_forward_and_backward():
    two = run_on_ranks(2, _collectives, False)[0]
    assert two == [{"all_reduce": 2}, {"all_reduce": 2}]
    both = {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}
    assert run_on_ranks(2, _collectives, True)[0] == [both, both]


def _on_meta():
    mesh = mesh_of(2, 2)
    with torch.device("meta"):
        model = Model(kinds="aor")
    tensor_parallel(model, mesh["tp"])
    shard(model, mesh["dp_shard"], mesh._flatten("everywhere"))
    model.to_empty(device=device().type)
    plain, source = seeded(kinds="aor"), {}
    for name, parameter in model.named_parameters():
        whole = plain.get_parameter(name).detach()
        spread = distribute_tensor(
            whole, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
        with torch.no_grad():
            parameter.copy_(spread)
        source[name] = float((parameter.full_tensor() - whole).abs().max())
    tokens, labels, _ = batch(4)
    want = one_process(copy_of(plain), tokens, labels)
    rows = slice(2 * mesh["dp_shard"].get_local_rank(), 2 * mesh["dp_shard"].get_local_rank() + 2)
    total = vocab_cross_entropy(model(tokens[rows]), labels[rows], mesh["tp"]).sum
    dist.all_reduce(total, group=mesh["dp_shard"].get_group())
    return float(total.detach() / (labels != -100).sum() - want), max(source.values())


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_meta_model_is_sharded_and_filled_later():
    for difference, source in run_on_ranks(4, _on_meta):
        assert abs(difference) < 1e-5
        assert source == 0.0


def _gathered():
    mesh = mesh_of(1, 2)
    model = seeded(kinds="a")
    tokens, _, _ = batch(2)
    want = copy_of(model)(tokens)
    tensor_parallel(model, mesh["tp"])
    local = model(tokens)
    whole = gather_vocab(local, mesh["tp"], 37)
    return tuple(local.shape), float((whole - want).abs().max()), float(local.max())


def test_logits_stay_sharded_and_can_be_gathered():
    ranks = run_on_ranks(2, _gathered)
    assert all(shape == (2, 8, 19) and error < 1e-5 for shape, error, _ in ranks)


def _too_short():
    mesh = mesh_of(1, 2)
    model = tensor_parallel(seeded(kinds="a"), mesh["tp"])
    try:
        model(torch.zeros(1, 7, dtype=torch.int64))
    except ValueError as error:
        return error


def test_rows_that_do_not_divide_are_rejected():
    error = run_on_ranks(2, _too_short)[1]
    assert_problem(error, "dim 1", 7, "divides")
    assert {"6", "8", "sequence_parallel"} <= set(re.findall(r"\w+", error.problems[0].fix))


def _refused():
    found, mesh = [], mesh_of(1, 4)
    cases = (
        (seeded(kinds="a"), {}),
        (seeded(kinds="a"), {"async_tp": True}),
        (nn.Linear(4, 4), {}),
    )
    for model, options in cases:
        before = {n: id(p) for n, p in model.named_parameters()}
        kind = type(model)
        tp = mesh["tp"] if not options else mesh["dp_shard"]
        try:
            tensor_parallel(model, tp, **options)
        except ValueError as error:
            found.append(error)
        assert before == {n: id(p) for n, p in model.named_parameters()}
        assert type(model) is kind
    return found


def test_models_that_cannot_be_sharded_are_rejected_before_anything_changes():
    heads, later, roles = run_on_ranks(4, _refused)[0]
    assert [p.key for p in heads.problems] == [f"layers.0.mixer.{name}_proj" for name in "kv"]
    assert_problem(heads, "layers.0.mixer.k_proj", 8, "divides")
    assert re.findall(r"\d+", heads.problems[0].fix) == ["1", "2"]
    assert_problem(later, "async_tp", True, "requires")
    assert_problem(roles, "roles", ..., "missing")
    assert "Linear" in str(roles)


def _fake():
    """One rank of four that do not exist, on tensors without storage."""
    store = FakeStore()
    dist.init_process_group("fake", rank=1, world_size=4, store=store)
    try:
        tp = mesh_of(2, 2)["tp"]
        with FakeTensorMode():
            model = Model(kinds="aor")
            tensor_parallel(model, tp)
            tokens = torch.zeros(2, 8, dtype=torch.int64)
            total = vocab_cross_entropy(model(tokens), tokens, tp).sum
            total.backward()
            shapes = {n: tuple(p.grad.shape) for n, p in model.named_parameters()}
            return shapes == {n: tuple(p.shape) for n, p in model.named_parameters()}
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_fake_group_runs_it_without_storage():
    assert _fake()
