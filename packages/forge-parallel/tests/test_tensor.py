"""Tensor parallelism of plain models computes what one process computes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from forge_parallel.axes.tensor import tensor_parallel
from forge_parallel.axes.vocab import vocab_cross_entropy
from forge_testing import run_on_ranks

sys.path.insert(0, str(Path(__file__).parent))
from tensor_models import (
    batch,
    copy_of,
    errors,
    mesh_of,
    one_process,
    seeded,
    shard,
)


def _against_one_process(dp, tp, cases):
    mesh = mesh_of(dp, tp)
    axis = SimpleNamespace(group=mesh["tp"].get_group(), size=tp, rank=mesh["tp"].get_local_rank())
    found = []
    for options, sequence_parallel in cases:
        model = seeded(**options)
        reference = copy_of(model)
        tokens, labels, ctx = batch(2 * dp)
        want = one_process(reference, tokens, labels, ctx)
        tensor_parallel(model, mesh["tp"], sequence_parallel=sequence_parallel)
        everywhere = mesh._flatten("everywhere") if "r" in options["kinds"] else None
        shard(model, mesh["dp_shard"], everywhere)
        rows = slice(
            2 * mesh["dp_shard"].get_local_rank(), 2 * mesh["dp_shard"].get_local_rank() + 2
        )
        mine = type(ctx)(valid=ctx.valid[rows])
        total, _ = vocab_cross_entropy(model(tokens[rows], mine), labels[rows], axis)
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


@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 2)])
def test_loss_and_every_gradient_equal_one_process(dp, tp):
    for rank in run_on_ranks(dp * tp, _against_one_process, dp, tp, CASES, timeout=120):
        for case, (loss, found, same_names) in zip(CASES, rank):
            worst = max(found, key=found.get)
            assert loss < 1e-5, case
            assert found[worst] < 1e-5, (case, worst, found[worst])
            assert same_names
