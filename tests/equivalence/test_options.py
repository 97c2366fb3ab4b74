"""The campaign's options: what runs where, and which file the figures go to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import run_cells
import torch
from cells import BF16_BOUNDS, CELLS, FEATURES, FP32_BOUND, LAYOUTS, Cell
from invalid_cells import REJECTIONS
from page import page
from run_cells import arguments, chosen_names

from forge_testing.devices import DEVICE, NPROC

pytestmark = pytest.mark.lane("test")

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_cells, "choose", lambda device, nproc: None)
    monkeypatch.setenv(DEVICE, "cuda")
    monkeypatch.setenv(NPROC, "1")


def error_of(given: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as left:  # prose: its code is asserted
        arguments(given)
    assert left.value.code == 2
    return capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_rejected_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = error_of(["--device", "cuda", "--nproc", "2"], capsys).splitlines()[-1]
    assert "error: device cuda " in said


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--tf32"], ": --tf32 "),
        (["--nproc", "2"], ": nproc 2 "),
    ],
)
def test_options_that_do_not_go_together(
    given: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert named in error_of(given, capsys)


@pytest.mark.usefixtures("one_gpu")
def test_rows_of_gpus_never_go_over_those_of_cpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert arguments([]).out == DOCS / "data/equivalence.json"
    assert arguments(["--device", "cuda"]).out == DOCS / "data/equivalence-cuda.json"
    assert arguments(["--device", "cuda", "--tf32"]).out == DOCS / "data/equivalence-cuda-tf32.json"
    cpu = ["--device", "cuda", "--out", str(DOCS / "data/equivalence.json")]
    assert "holds rows of CPUs; name another file" in error_of(cpu, capsys)
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"cell": "tp/packed/sgd", "device": "H200", "tf32": True}]))
    for given in ([], ["--device", "cuda"]):
        message = error_of([*given, "--out", str(path)], capsys)
        assert "holds rows of H200 in TF32; name another file" in message
    assert arguments(["--device", "cuda", "--tf32", "--out", str(path)]).out == path


def test_a_part_without_a_name_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    """No cell is red where none was run."""
    assert ": --only 'fdsp' " in error_of(["--only", "fdsp"], capsys)


@pytest.mark.usefixtures("one_gpu")
def test_on_one_gpu_every_feature_runs_and_cells_of_more_are_named() -> None:
    names, left = chosen_names(arguments(["--device", "cuda"]))
    assert {LAYOUTS[name.split("/")[0]].world for name in names} == {1}
    assert left["fsdp_2/packed/sgd"] == "needs 2 GPUs"
    assert left["one_rank/idle_moe_grouped_mm/sgd"] == "grouped_mm takes fp32 on CPUs only"
    assert not {*names, *left} & {*REJECTIONS}
    assert len(names) + len(left) == len(CELLS)
    on_cpus = {name for name, f in FEATURES.items() if f.only_on_cpus}
    assert {name.split("/")[1] for name in names} | on_cpus | {"accumulation_deferred"} == {*FEATURES}  # fmt: skip
    products, _ = chosen_names(arguments(["--device", "cuda", "--tf32"]))
    assert not [name for name in products if "bf16" in name]


def test_bounds_of_tf32_lie_between_those_of_fp32_and_bf16() -> None:
    for feature in ("packed", "moe", "pictures"):
        bounds = Cell("one_rank", feature, "sgd", tf32=True).bounds
        assert bounds.pop("routes", 0.0) == 0.0
        assert bounds.keys() == BF16_BOUNDS.keys()
        assert all(bound > FP32_BOUND for bound in bounds.values())
    assert all(b == BF16_BOUNDS[n] / 4 for n, b in Cell("tp", "packed", "sgd", tf32=True).bounds.items())  # fmt: skip


def test_a_page_of_gpus_names_them_and_what_they_were_set_to() -> None:
    cell = Cell("one_rank", "packed", "sgd", tf32=True)
    row: dict[str, Any] = {"cell": cell.name, "error": dict.fromkeys(cell.bounds, 1e-4), "bound": cell.bounds}  # fmt: skip
    row |= {"seconds": 1.0, "commit": "c", "torch": "t", "device": "H200", "settings": "TF32 on"}
    said = page([row | {"tf32": True}], "equivalence-cuda-tf32.json")
    assert "on H200 (TF32 on)" in said
    assert "`equivalence-cuda-tf32.json`" in said
    assert "Worst error in TF32: 1.0e-04" in said
    assert "- TF32: loss 0.0005, gradients 0.0125" in said
    assert "refused" not in said
