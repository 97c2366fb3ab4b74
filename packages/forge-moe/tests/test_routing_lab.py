"""The routing lab of forge-moe's benchmarks: its scenarios, exact cells, and a broken layer that it reports."""

import json
import sys
from pathlib import Path

import pytest
import torch

from forge_moe import LocalDispatch

pytestmark = pytest.mark.lane("test")

LAB = Path(__file__).parents[1] / "benchmarks"
if not LAB.is_dir():
    pytest.skip("only the repository has benchmarks/", allow_module_level=True)
sys.path.append(str(LAB))

from lab_cell import Settings, run_cell  # noqa: E402
from peak_memory import peak_bytes  # noqa: E402
from routing_lab import main  # noqa: E402
from routing_scenarios import SCENARIOS, Shape  # noqa: E402

SHAPE = Shape(num_tokens=40, num_experts=8, top_k=2, num_ranks=4)
SMALL = Settings(num_tokens=24, dim=16, hidden_dim=16, num_experts=8, top_k=2, rounds=1)


def counts(name: str, rank: int = 1, step: int = 0) -> list[int]:
    return SCENARIOS[name](SHAPE, rank, step).flatten().bincount(minlength=8).tolist()


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("top_k", [1, 2, 7])
def test_experts_of_a_token_are_distinct_and_the_same_each_time(name: str, top_k: int) -> None:
    for step in range(4):
        ids = SCENARIOS[name](SHAPE._replace(top_k=top_k), 1, step)
        assert ids.shape == (40, top_k)
        assert all(len(set(token)) == top_k for token in ids.tolist())
        assert 0 <= int(ids.min()) <= int(ids.max()) < 8
        assert torch.equal(ids, SCENARIOS[name](SHAPE._replace(top_k=top_k), 1, step))


def test_scenarios_load_experts_as_named() -> None:
    assert counts("balanced") == [10] * 8
    assert counts("hot_expert")[0] == 40
    assert max(counts("hot_expert")[1:]) <= 6
    assert counts("hot_rank") == [40, 40] + [0] * 6
    assert counts("ragged")[0] > 3 * counts("ragged")[7] > 0
    assert counts("ragged", rank=0) != counts("ragged", rank=1)
    assert [max(counts("rotating", step=s)) for s in range(4)] == [40] * 4
    assert [counts("rotating", step=s).index(40) for s in range(4)] == [0, 2, 4, 6]
    assert [max(counts("burst", step=s)) for s in range(4)] == [10, 10, 10, 40]
    assert sum(counts("zero_tokens", rank=0)) == 0
    assert sum(counts("zero_tokens", rank=1)) == 80


@pytest.mark.lane("quick")
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_cell_is_exact(name: str) -> None:
    cell = run_cell(SMALL, name, "loop", "local")
    assert cell.exact
    assert cell.error < 1e-5
    assert 0 < cell.milliseconds <= cell.slowest_step


def test_a_wrong_layer_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    right = LocalDispatch.combine
    monkeypatch.setattr(
        LocalDispatch, "combine", lambda self, rows, meta: 1.001 * right(self, rows, meta)
    )
    cell = run_cell(SMALL, "balanced", "loop", "local")
    assert not cell.exact


def test_peak_bytes_counts_what_is_alive_at_once() -> None:
    x = torch.ones(1000)

    def step() -> torch.Tensor:
        y = x + 1  # 4000 bytes
        y = y * 2  # both for a moment
        y.add_(1)  # none of its own
        return y.view(10, 100)[1:] + 0  # 3600 more

    assert peak_bytes(step, "cpu") == 8000


def test_the_table_and_the_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--num-tokens", "16", "--dim", "18", "--hidden-dim", "16", "--rounds", "1"]
    arguments += ["--scenarios", "balanced", "burst", "--backends", "loop", "grouped_mm"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "burst        loop       local" in text
    assert "refused: burst, grouped_mm, local: backend 'grouped_mm' needs widths" in text
    assert main([*arguments, "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert [cell["scenario"] for cell in found["cells"]] == ["balanced", "burst"]
    assert len(found["refused"]) == 2


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--num-tokens", "16", "--dim", "16", "--hidden-dim", "16", "--rounds", "1"]
    arguments += ["--scenarios", "zero_tokens", "rotating", "--backends", "grouped_mm"]
    arguments += ["--dispatchers", "all_to_all", "hierarchical", "--ranks", "2", "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert [cell["dispatcher"] for cell in found["cells"]] == ["all_to_all", "hierarchical"] * 2
    assert all(cell["error"] < 1e-5 for cell in found["cells"])
