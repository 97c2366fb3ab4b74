"""Backends and dispatchers of other packages, found by name: the example of the reference runs."""

from __future__ import annotations

import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from forge_moe import MoE, MoEConfig, _registered, expert_parallelize
from forge_moe.grouped_mm import find_backend
from forge_moe.parallel import find_dispatcher
from forge_testing import run_on_ranks
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")


@pytest.fixture
def my_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The module of the reference, on the path; its source."""
    readme = (Path(__file__).parents[3] / "docs/internals/forge-moe.md").read_text()
    (source,) = re.findall(
        r"cat > my_experts.py <<'EOF'\n(.*?)^EOF$", readme, re.DOTALL | re.MULTILINE
    )
    (tmp_path / "my_experts.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_experts", raising=False)
    find_backend.cache_clear()
    return source


def layer(backend: str) -> MoE:
    torch.manual_seed(0)
    moe = MoE(MoEConfig(8, 16, 4, backend=backend, bias=True))
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return moe


def values(moe: MoE) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(12, 8, requires_grad=True)
    y = moe(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in moe.parameters())]


@pytest.mark.parametrize("name", ["my_experts:by_row", "rows"])
def test_the_backend_of_the_readme_computes_what_the_loop_does(
    my_experts, monkeypatch, name
) -> None:
    point = EntryPoint("rows", "my_experts:by_row", "forge.gemm_backends")
    monkeypatch.setattr(_registered, "entry_points", lambda group: [point] * (group == point.group))
    for found, wanted in zip(values(layer(name)), values(layer("loop"))):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def ranks_with(dispatcher: str, path: str) -> list[torch.Tensor]:
    sys.path.insert(0, path)
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        moe = expert_parallelize(layer("loop"), mesh, dispatcher=dispatcher)
        assert type(moe.dispatcher).__name__ == (
            "Dispatch" if ":" in dispatcher else "AllToAllDispatch"
        )
        return [v.to_local() if isinstance(v, DTensor) else v for v in values(moe)]
    finally:
        sys.path.remove(path)


@pytest.mark.distributed
def test_the_dispatcher_of_the_readme_runs_on_ranks(my_experts, tmp_path) -> None:
    found = run_on_ranks(2, ranks_with, "my_experts:Dispatch", str(tmp_path))
    wanted = run_on_ranks(2, ranks_with, "all_to_all", str(tmp_path))
    for mine, theirs in zip(found, wanted):
        assert all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("magic", "unknown"),
        ("no_such_package:backend", "not_found"),
        ("my_experts:no", "not_found"),
        ("my_experts:Dispatch", "type"),
    ],
)
def test_a_backend_that_is_not_there_is_an_error(my_experts, name: str, code: str) -> None:
    with rejects("backend", name, code):
        layer(name)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("magic", "unknown"),
        ("no_such_package:Dispatch", "not_found"),
        ("my_experts:by_row", "type"),
    ],
)
def test_a_dispatcher_that_is_not_there_is_an_error(my_experts, name: str, code: str) -> None:
    with rejects("dispatcher", name, code):
        find_dispatcher(name)


def test_a_package_that_is_registered_and_lacks_what_it_needs_is_an_error(monkeypatch) -> None:
    point = EntryPoint("deep_ep", "forge_deep_ep_is_not_installed:Dispatch", "forge.dispatchers")
    monkeypatch.setattr(_registered, "entry_points", lambda group: [point])
    with rejects("dispatcher", "deep_ep", "not_found"):
        find_dispatcher("deep_ep")
