"""forge-train extract in layouts and as safetensors: the values of one process, and a kill that changes nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import pytest

from forge_lab import activation_files
from forge_lab.extract import extract_run
from forge_parallel import ParallelConfig, make_meshes
from forge_testing import run_on_ranks
from forge_testing.evaluations import asked
from forge_testing.processes import forge_train
from forge_testing.runs import fit_alone, make_job

POINTS = ("layers.*.resid_*", "*.head_out", "*.attn_*", "*.router_logits", "final_norm", "logits")
ROWS = 7  # no batch and no number of ranks divides them
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "cp2": (2, {"cp": 2}),
    "pp2": (2, {"pp": 2}),
    "fsdp2-ep2": (2, {"ep": 2}),
    "fsdp2-tp2": (4, {"tp": 2}),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a mixture of experts, two layers deep."""
    path = make_job(tmp_path_factory.mktemp("extracted"))
    experts = {"model.moe.num_experts": 4, "model.moe.top_k": 2, "model.num_layers": 2}
    fit_alone(path, **(asked(path.parent) | experts))
    return path.parent / "run"


def extracted(
    run: Path, out: Path, options: dict[str, Any], rows: int = ROWS, batch: int = 2
) -> tuple[int, int]:
    parallel = ParallelConfig(device="cpu", precision="fp32", **options)
    meshes = make_meshes(parallel)
    return extract_run(run, POINTS, out, rows, batch, parallel=parallel, meshes=meshes)


@pytest.fixture(scope="module")
def alone(run: Path) -> dict[str, numpy.ndarray]:
    out = run.parent / "alone.npz"
    extract_run(run, POINTS, out, ROWS, 2)
    with numpy.load(out) as found:
        return {name: found[name] for name in found.files}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_writes_the_values_of_one_process(
    run: Path, alone: dict[str, numpy.ndarray], tmp_path: Path, layout: str
) -> None:
    world, options = LAYOUTS[layout]
    out = tmp_path / "x.npz"
    assert {count for _, count in run_on_ranks(world, extracted, run, out, options)} == {ROWS}
    assert [p.name for p in tmp_path.iterdir()] == ["x.npz"]
    with numpy.load(out) as found:
        meta = json.loads(str(found["meta"]))
        assert (meta["ranks"], meta["parallel"]) == (world, options)
        assert found.files == list(alone), "the arrays, in one order"
        for name, wanted in alone.items():
            if name == "meta":
                continue
            assert found[name].shape == wanted.shape
            largest = numpy.abs(wanted).max()
            assert numpy.abs(found[name] - wanted).max() <= 1e-5 * largest, name


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_folder_holds_the_same_in_shards(
    run: Path, alone: dict[str, numpy.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors import safe_open

    row = sum(value.nbytes for name, value in alone.items() if name != "meta") // ROWS
    join, most = activation_files.Parts.join, 3 * row + 1
    monkeypatch.setattr(activation_files.Parts, "join", lambda parts, _: join(parts, most))
    write, calls = activation_files.write_file, []

    class Killed(BaseException):
        pass

    def third(path: Path, content: bytes | str) -> None:
        calls.append(path.name)
        if len(calls) == 3:
            raise Killed
        write(path, content)

    monkeypatch.setattr(activation_files, "write_file", third)
    with pytest.raises(Killed):
        extract_run(run, POINTS, tmp_path / "torn", ROWS, 2)
    extract_run(run, POINTS, tmp_path / "torn", ROWS, 2)
    names = [f"rows-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert calls == ["request.json", *names[:2], *names[1:], "index.json"], "the first stayed"
    extract_run(run, POINTS, tmp_path / "whole", ROWS, 2)
    index = json.loads((tmp_path / "whole/index.json").read_text())
    assert [(s["file"], s["first_row"], s["rows"]) for s in index["shards"]] == [
        (names[0], 0, 3), (names[1], 3, 3), (names[2], 6, 1)
    ]  # fmt: skip
    assert index["meta"] == json.loads(str(alone["meta"]))
    for shard in index["shards"]:
        path = tmp_path / "whole" / shard["file"]
        assert path.read_bytes() == (tmp_path / "torn" / shard["file"]).read_bytes()
        with safe_open(path, "np") as found:
            assert json.loads(found.metadata()["meta"]) == index["meta"] | shard
            assert {*found.keys()} == {*index["arrays"]} == {*alone} - {"meta"}
            for name in found.keys():  # noqa: SIM118
                rows = slice(shard["first_row"], shard["first_row"] + shard["rows"])
                assert numpy.array_equal(found.get_tensor(name), alone[name][rows])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["torn", "whole"]


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_that_are_killed_go_on_to_the_same_file(run: Path, tmp_path: Path) -> None:
    command = ["extract", str(run), "--points", *POINTS, "--rows", "24", "--batch_size", "1",
               "--device", "cpu", "--nproc", "2", "--parallel.tp", "2", "--output"]  # fmt: skip
    whole, torn = tmp_path / "whole.npz", tmp_path / "torn.npz"
    run_on_ranks(2, extracted, run, whole, {"tp": 2}, 24, 1)
    process = subprocess.Popen(
        [sys.executable, "-m", "forge_train", *command, str(torn)], start_new_session=True
    )
    parts = tmp_path / "torn.npz.parts"
    while process.poll() is None and len(list(parts.glob("rows-*.npz"))) < 3:
        time.sleep(0.001)  # polling a directory
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not torn.exists()
    done = forge_train(*command, str(torn))
    assert done.code == 0, done.err
    assert done.out.count("24 rows of validation at step") == 1, "one rank prints"
    assert torn.read_bytes() == whole.read_bytes()
