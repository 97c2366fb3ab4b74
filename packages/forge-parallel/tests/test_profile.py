"""Tables of traces against sums by hand, and windows of a real profiler."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from forge_parallel import ParallelConfig, _torch_compat, launch, parallelize
from forge_parallel.profile import (
    ProfileWindow,
    breakdown,
    markdown,
    memory_by_category,
    read_trace,
    span,
)
from forge_parallel.profile.breakdown import intersect, subtract, union
from forge_parallel.profile.kinds import kind_of_kernel, kind_of_operators
from forge_parallel.profile.memory import peak_of_trace
from forge_testing import device, run_on_ranks
from forge_testing.problems import assert_problem, rejects

pytestmark = pytest.mark.lane("test")


def test_sets_of_instants_are_those_of_a_grid() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        drawn = torch.randint(0, 40, (2, 6, 2), generator=generator).sort(-1).values.tolist()
        a, b = (union(tuple(i) for i in part) for part in drawn)
        on_grid = [{t for s, e in part for t in range(s, e)} for part in drawn]
        for found, wanted in (
            (a, on_grid[0]),
            (intersect(a, b), on_grid[0] & on_grid[1]),
            (subtract(a, b), on_grid[0] - on_grid[1]),
        ):
            assert {t for s, e in found for t in range(int(s), int(e))} == wanted
            assert sum(end - start for start, end in found) == len(wanted)


# ---- traces by hand, in milliseconds


def event(cat: str, name: str, start: float, end: float, tid: int = 1, **args: Any) -> Any:
    times = {"ts": start * 1e3, "dur": (end - start) * 1e3}
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "args": args, **times}


def launched(
    cat: str, name: str, at: float, start: float, end: float, number: int, stream: int = 7
) -> list[Any]:
    call = event("cuda_runtime", "cudaLaunchKernel", at, at + 0.1, correlation=number)
    return [call, event(cat, name, start, end, tid=stream, correlation=number)]


GPU = [
    *(event("user_annotation", f"ProfilerStep#{n}", 50 * n, 50 * n + 50) for n in (0, 1)),
    event("user_annotation", "forge.forward", 0, 20),
    event("cpu_op", "aten::linear", 1, 5),
    event("cpu_op", "aten::addmm", 2, 4),
    *launched("kernel", "nvjet_tst_128x256", 3, 10, 30, 1),
    event("cpu_op", "aten::scaled_dot_product_attention", 6, 12),
    event("cpu_op", "aten::bmm", 7, 9),
    *launched("kernel", "void cutlass::Kernel2<...gemm...>", 8, 30, 40, 2),
    event("cpu_op", "c10d::_allgather_base_", 14, 16),
    *launched("kernel", "ncclDevKernel_AllGather_RING_LL", 15, 20, 60, 3, stream=20),
    event("user_annotation", "forge.optimizer", 50, 60),
    event("cpu_op", "aten::_foreach_addcdiv_", 51, 55),
    *launched("kernel", "void multi_tensor_apply_kernel<...>", 52, 60, 70, 4),
    event("cpu_op", "aten::mul", 61, 63),
    *launched("kernel", "void vectorized_elementwise_kernel<4>", 62, 65, 72, 5, stream=8),
    *launched("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 64, 72, 75, 6),
    event("cpu_op", "aten::mm", 200, 210),
    event("kernel", "nvjet_of_a_step_before", -5, 2, tid=7, correlation=99),  # its launch unseen
]
"""Step 0 to 100 ms. Streams:  7: product [0, 2] and [10, 30], attention [30, 40], optimizer [60, 70], copy [72, 75];
8: elementwise [65, 72];  20: communication [20, 60], of which [20, 40] is under products and attention."""


def test_seconds_of_a_gpu_by_kind_are_those_by_hand() -> None:
    found = breakdown(GPU)
    assert (found["device"], found["steps"]) == ("cuda", 2)
    wanted = {
        "gemm": 22,
        "attention": 10,
        "optimizer": 10,
        "elementwise": 2,  # what is under the optimizer counts once
        "copy": 3,
        "communication": 20,
        "idle": 100 - 67,
    }
    assert found["kinds"] == pytest.approx({k: ms / 1e3 for k, ms in wanted.items()})
    assert found["communication_hidden"] == pytest.approx(20 / 1e3)
    assert sum(found["kinds"].values()) == pytest.approx(found["seconds"]) == 0.1


def test_spans_of_a_gpu_own_the_kernels_that_they_launched() -> None:
    spans = breakdown(GPU)["spans"]
    forward, optimizer = spans["forward"], spans["optimizer"]
    # launched before 20 ms: [10, 60]. No kernel ran from 2 to 10 ms
    wanted = {"count": 1, "host_seconds": 0.02, "device_seconds": 0.05, "idle_seconds": 0.008}
    assert forward == pytest.approx(wanted)
    wanted = {"count": 1, "host_seconds": 0.01, "device_seconds": 0.01, "idle_seconds": 0.0}
    assert optimizer == pytest.approx(wanted)


CPU = [
    event("user_annotation", "ProfilerStep#3", 0, 100),
    event("user_annotation", "forge.backward", 10, 60),
    event("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 10, 30),
    event("cpu_op", "aten::mm", 12, 28),
    event("cpu_op", "aten::transpose", 13, 14),  # a part of the product around it
    event("cpu_op", "aten::gelu", 30, 40),
    event("cpu_op", "aten::copy_", 36, 39),
    event("user_annotation", "gloo:all_reduce", 35, 50, tid=2),
    event("cpu_op", "aten::add_", 44, 46, tid=2),  # its sum is communication
    event("user_annotation", "gloo:all_reduce", 45, 55, tid=2),  # overlaps without being nested
    event("user_annotation", "FSDP::all_gather (0)", 60, 70),  # waits, in Python
    event("cpu_op", "fsdp::all_gather_copy_in", 62, 64),
    event("cpu_op", "aten::sum", 99, 120),  # over the end
]


def test_seconds_of_a_cpu_are_self_times_of_operators() -> None:
    found = breakdown(CPU)
    wanted = {"gemm": 16, "elementwise": 7 + 1, "copy": 3 + 2, "communication": 15}
    wanted |= {"attention": 0, "optimizer": 0, "idle": 100 - 44}
    assert found["kinds"] == pytest.approx({k: ms / 1e3 for k, ms in wanted.items()})
    assert found["communication_hidden"] == pytest.approx(5 / 1e3)  # [35, 40]
    span = found["spans"]["backward"]
    assert span["device_seconds"] == pytest.approx((16 + 10 + 15) / 1e3)
    assert span["idle_seconds"] == pytest.approx(span["host_seconds"] - span["device_seconds"])


def test_the_table_has_what_was_found() -> None:
    text = markdown({**breakdown(GPU), "memory": {"parameters": 3 * 2**20}})
    assert "| matrix products | 11.000 | 22.0% |" in text
    assert "| communication, exposed | 10.000 | 20.0% |" in text
    (hidden,) = (line for line in text.splitlines() if "communication, hidden" in line)
    assert hidden.endswith("| 10.000 | 20.0% |")
    assert "| step | 50.000 | 100.0% |" in text
    assert "| forward | 0.5 | 10.000 | 25.000 | 4.000 |" in text
    assert "| parameters | 3.00 |" in text


@pytest.mark.parametrize(
    ("kernel", "around", "kind"),
    [
        ("sm90_xmma_gemm_bf16bf16", (), "gemm"),
        ("void flash_fwd_kernel<...>", (), "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", (), "attention"),
        ("triton_poi_fused_mm_silu_0", (), "elementwise"),
        ("triton_tem_fused_mm_3", (), "gemm"),
        ("void at::native::CatArrayBatchedCopy<...>", ("aten::cat",), "copy"),
        ("fused_adam_kernel", (), "optimizer"),
        ("nvjet_tst", ("Optimizer.step#Muon.step", "aten::mm"), "optimizer"),
        ("ncclDevKernel_AllReduce", ("Optimizer.step#Muon.step",), "communication"),
        ("void reduce_kernel<512>", ("c10d::allreduce_",), "elementwise"),
    ],
)
def test_kinds_of_kernels(kernel: str, around: tuple[str, ...], kind: str) -> None:
    assert kind_of_kernel(kernel, around) == kind


def test_code_of_python_and_of_the_engine_is_no_operator() -> None:
    assert kind_of_operators(("forge.optimizer",)) is None
    assert kind_of_operators(("forge.optimizer", "aten::mm")) == "optimizer"
    assert kind_of_operators(("autograd::engine::evaluate_function: MulBackward0",)) is None
    assert kind_of_operators(("autograd::engine::evaluate_function: M", "my::op")) == "elementwise"
    assert kind_of_operators(("CompiledFunction",)) is None
    assert kind_of_operators(("CompiledFunction", "## Call CompiledFxGraph ab ##")) == "elementwise"


# ---- memory


def test_the_peak_of_a_trace_is_split_by_addresses() -> None:
    def change(at: float, size: int, address: int, total: int, kind: int = 0) -> Any:
        args = {"Bytes": size, "Addr": address, "Total Allocated": total, "Device Type": kind}
        return {"ph": "i", "name": "[memory]", "ts": at * 1e3, "args": args}

    trace = [
        event("user_annotation", "ProfilerStep#0", 0, 5),
        event("user_annotation", "ProfilerStep#1", 10, 20),
        change(1, 1000, 8, 1500),  # another step
        change(11, 60, 1, 560),  # an activation where a gradient comes later
        change(12, 40, 2, 600),
        change(13, -60, 1, 540),
        change(14, 30, 1, 570),  # that gradient
        change(15, 70, 3, 640),  # the peak, 140
        change(16, 900, 9, 9999, kind=1),  # another device
        change(17, -70, 3, 570),
        change(18, 50, 4, 620),  # a gradient after the peak
    ]
    found = peak_of_trace(trace, "cpu", {1, 4})
    assert found == {
        "activations_and_other": 110,
        "step_peak_gradients": 30,
        "step_peak": 140,
    }
    assert peak_of_trace(trace, "cuda", set())["peak"] == 9999


class Net(nn.Module):
    """5 x 12 + 12 and 12 x 4 weights: no two ranks hold as much."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 12), nn.Linear(12, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.gelu(self.first(x)))


def bytes_of_a_rank(folder: str) -> tuple[int, dict[str, int], dict[str, int]]:
    with launch(ParallelConfig(device=device().type, precision="fp32")) as meshes:
        model = parallelize(Net(), ParallelConfig(device=device().type, precision="fp32"), meshes)
        optimizer = torch.optim.AdamW(model.parameters())
        window = ProfileWindow(folder, start_step=2, num_steps=1, rank=meshes.rank, memory=True)
        found = []
        for step in (1, 2):
            with window.step(step):
                model(torch.ones(7, 5)).sum().backward()
                optimizer.step()
                window.measure(model, optimizer)
                found.append(memory_by_category(model, optimizer))
                optimizer.zero_grad()
        written = window.write()
        assert written is not None
        assert memory_by_category(model, optimizer)["gradients"] == 0
        return meshes.rank, found[0], written["memory"]


@pytest.mark.distributed
def test_bytes_under_fsdp_are_those_by_hand(tmp_path: Path) -> None:
    """Rows of each parameter are cut in two: 6 x 5, 6 and 2 x 12 numbers in fp32 on each rank, without padding."""
    own = 4 * (6 * 5 + 6 + 2 * 12)
    wanted = {"parameters": own, "gradients": own, "optimizer": 2 * own + 3 * 4}  # 3 step counts
    for rank, plain, written in run_on_ranks(2, bytes_of_a_rank, str(tmp_path)):
        assert plain == wanted
        assert {k: written[k] for k in wanted} == wanted
        assert written["activations_and_other"] >= 4 * (5 * 12 + 12 + 12 * 4)  # all is gathered
        table = json.loads((tmp_path / f"step-2/rank-{rank}.json").read_text())
        assert table["kinds"]["communication"] > 0
        assert table["kinds"]["gemm"] > 0


def test_activations_are_those_that_a_step_keeps(tmp_path: Path) -> None:
    """The peak is in the backward of the second matrix: input and output of gelu, the gradient of its output, and that
    of the matrix itself."""
    rows, dim = 64, 32
    model = nn.Sequential(nn.Linear(dim, dim, bias=False), nn.GELU(), nn.Linear(dim, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    window = ProfileWindow(tmp_path, start_step=2, num_steps=1, memory=True)
    x = torch.ones(rows, dim)
    for step in (1, 2):
        optimizer.zero_grad()
        with window.step(step):
            model(x).sum().backward()
            window.measure(model, optimizer)
    found = window.write()
    assert found is not None
    memory, kept = found["memory"], 4 * rows * dim
    assert memory["parameters"] == memory["gradients"] == 4 * (dim * dim + dim)
    assert memory["step_peak_gradients"] == 4 * dim
    small = 2 * 4 * rows  # the sum's gradient and the output
    assert 3 * kept <= memory["activations_and_other"] <= 3 * kept + small


# ---- windows


def train(folder: Path, steps: int = 9, **options: Any) -> tuple[list[int], torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    window = ProfileWindow(folder, **options)
    full = []
    for step in range(1, steps + 1):
        with window.step(step):
            with span("forward"):
                loss = model(torch.full((2, 4), float(step))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if window.is_full:
            full.append(step)
        window.write()
    window.close()
    return full, model.weight.detach()


def test_windows_open_by_step_and_change_no_number(tmp_path: Path) -> None:
    full, weight = train(tmp_path, start_step=2, num_steps=2, every_steps=4)
    assert full == [3, 7]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-2", "step-6"]
    files = sorted(p.name for p in (tmp_path / "step-6").iterdir())
    assert files == ["rank-0.json", "rank-0.md", "rank-0.trace.json.gz"]
    trace = tmp_path / "step-6/rank-0.trace.json.gz"
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    found = breakdown(read_trace(trace))
    assert (found["steps"], found["spans"]["forward"]["count"]) == (2, 2)
    assert found["kinds"]["gemm"] > 0 < found["kinds"]["optimizer"]
    off, plain = train(tmp_path / "off", start_step=2, num_steps=0)
    assert (off, torch.equal(plain, weight)) == ([], True)
    assert not (tmp_path / "off").exists()
    assert train(tmp_path / "short", steps=2, start_step=2, num_steps=2)[0] == []


def test_a_window_without_its_warm_up_or_with_an_error_is_left_out(tmp_path: Path) -> None:
    window = ProfileWindow(tmp_path, start_step=2, num_steps=2, every_steps=10)
    for step in (2, 3, 4):  # a resume after step 1
        with window.step(step):
            pass
        assert window.write() is None
    with window.step(11):
        pass
    with pytest.raises(KeyError, match="12"), window.step(12):
        raise KeyError(12)
    assert window.write() is None
    for step in (21, 22, 23):  # and the next one is whole
        with window.step(step):
            pass
    found = window.write()
    assert found is not None
    assert (found["step"], found["steps"]) == (22, 2)


def test_a_truncated_trace_is_an_error_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch leaves it when the folder for temporary files is full."""

    def cut(self: torch.profiler.profile, path: str) -> None:
        Path(path).write_bytes(gzip.compress(b'{"traceEvents": [{"ph": '))

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", cut)
    with pytest.raises(OSError, match=r"rank-0\.trace\.json\.gz"):
        train(tmp_path, start_step=2, num_steps=1)


def test_numbers_without_meaning_are_rejected(tmp_path: Path) -> None:
    with rejects("start_step", 1, "range") as caught:
        ProfileWindow(tmp_path, start_step=1, num_steps=3, every_steps=3)
    assert_problem(caught.value, "every_steps", 3, "range")
    with rejects("num_steps", -1, "range"):
        ProfileWindow(tmp_path, start_step=2, num_steps=-1)


def test_this_torch_has_the_names_of_memory_snapshots() -> None:
    names = ("_record_memory_history", "_dump_snapshot")
    _torch_compat.require_attributes(torch.cuda.memory, *names)
