"""The table of cells on the null GPU: what it holds, and what is told from it. The run itself is `hatch run null-gpu matrix`."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.null_gpu.counted import count
from tests.null_gpu.matrix import PAGE, TABLE, _against, _arguments, _names, _row, page

from forge_testing import device, run_on_ranks

pytestmark = pytest.mark.lane("test")

RANK = {"c10d.allreduce_": 3, "launch": 100}


def test_the_table_has_every_smoke_cell_and_the_page_matches_it() -> None:
    table = json.loads(TABLE.read_text())
    names, left = _names(_arguments([]))
    told = [row["cell"] for row in table["cells"]]
    assert told == [name for name in names if name in told], "hatch run null-gpu matrix --write"
    assert table["not_run"].keys() == {*names, *left} - {*told}
    assert left.items() <= table["not_run"].items()
    assert PAGE.read_text() == page(table), "hatch run null-gpu matrix --write"
    for row in table["cells"]:
        assert row["device"]["launch"] > 0
        assert row["ranks"] == 1 or row["collectives"]


@pytest.mark.parametrize(
    ("null", "gloo", "said"),
    [
        ([RANK] * 2, [{"c10d.allreduce_": 3}] * 2, ""),
        ([RANK] * 2, [{"c10d.allreduce_": 4}] * 2, "collectives {'c10d.allreduce_': 6}"),
        ([{"c10d.allreduce_": 3}], [{"c10d.allreduce_": 3}], "no kernel was launched"),
        ("rank 0 died", [{"c10d.allreduce_": 3}], "did not reach its end on the null GPU"),
    ],
)
def test_a_cell_that_requests_other_work_is_wrong(null: Any, gloo: Any, said: str) -> None:
    _, problems = _row("tp/packed/sgd", null, gloo)
    assert len(problems) == bool(said)
    assert all(problem.startswith(said) for problem in problems)


def test_a_kernel_more_than_in_the_table_is_reported() -> None:
    kept, _ = _row("tp/packed/sgd", [RANK], [RANK])
    assert _against(kept, kept) == []
    assert _against(kept, None) == ["lacks a row; add it with --write"]
    more, _ = _row("tp/packed/sgd", [{**RANK, "launch": 101}], [RANK])
    assert _against(more, kept) == ["device {'launch': 101}, kept {'launch': 100}"]


def of_one_function() -> dict[str, int]:
    weight = torch.ones(2, device=device(), requires_grad=True)
    weight.register_hook(dist.all_reduce)

    def backward() -> None:
        (weight * 2).sum().backward()

    found = count(backward)
    return {kind: n for kind, n in found.items() if kind.startswith("c10d.")}


@pytest.mark.distributed
def test_collectives_of_a_backward_are_counted_once() -> None:
    assert run_on_ranks(2, of_one_function) == [{"c10d.allreduce_": 1}] * 2
