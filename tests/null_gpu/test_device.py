"""The null GPU itself: it counts what happens, and only that. Each program runs in processes of its own, on the device."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.null_gpu import device

pytestmark = pytest.mark.lane("test")

WHY_NOT = device.why_not()
GIB = 2**30


def needs_null_gpu(test: Any) -> Any:
    return pytest.mark.slow(pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)(test))


def main(argv: list[str]) -> int:
    """These tests, as a campaign of `hatch run null-gpu`."""
    return int(pytest.main([__file__, "--lane", "everything", *argv]))


def _run(folder: Path, program: str, ranks: int = 1, **options: float) -> str:
    """Output of a program on the null GPU, its tables left in `counts` and `waits` of the folder."""
    (folder / "program.py").write_text(textwrap.dedent(program))
    done = device.run(
        [str(folder / "program.py")],
        ranks=ranks,
        timeout=300,
        counts=folder / "counts",
        waits=folder / "waits",
        env={"ROOT": str(Path(device.__file__).parents[2])},
        **options,  # type: ignore[arg-type]
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def _counts(folder: Path) -> dict[int, Counter[str]]:
    return device.read(folder / "counts")


def test_a_torch_for_cpus_is_rejected(tmp_path: Path) -> None:
    """The message says which torch it is and which to install; an interpreter without torch has one of its own."""
    site = tmp_path / "torch"
    site.mkdir()
    (site / "__init__.py").touch()
    (site / "version.py").write_text("__version__ = '2.13.0+cpu'\ncuda = None\n")
    python = tmp_path / "python"
    for path, message in (
        (tmp_path, "2.13.0.cpu is built for CPUs.*===2.13.0"),
        (tmp_path / "none", "has no torch.*==="),
    ):
        python = path / "interpreter"
        path.mkdir(exist_ok=True)
        python.write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {sys.executable} -S "$@"\n')
        python.chmod(0o755)
        with pytest.raises(device.Unavailable, match=message):
            device.build(python)


@needs_null_gpu
def test_launches_copies_and_matmuls_are_counted(tmp_path: Path) -> None:
    output = _run(
        tmp_path,
        """
        import os, sys, torch

        sys.path.insert(0, os.environ["ROOT"])
        from tests.null_gpu.device import counted

        def show(label, work):
            before = counted()
            work()
            print(label, sorted((counted() - before).items()))

        a = torch.empty(64, 64, device="cuda")
        b = torch.ones(64, 64)
        pinned = torch.ones(64, 64).pin_memory()
        a @ a
        show("kernel", lambda: a.add_(1))
        show("product", lambda: torch.mm(a, a, out=a))
        show("to device", lambda: a.copy_(pinned, non_blocking=True))
        show("pageable", lambda: a.copy_(b))
        show("on device", lambda: a.copy_(a[:]))
        show("to host", lambda: pinned.copy_(a, non_blocking=True))
        show("wait", torch.cuda.synchronize)
        """,
    )
    seen = dict(line.split(" [") for line in output.splitlines() if " [" in line)
    assert seen["kernel"] == "('launch', 1)]"
    assert seen["product"] == "('blas', 1)]"
    assert seen["to device"] == "('copy.host_to_device', 1), ('copy.host_to_device.bytes', 16384)]"
    assert "('copy.host_to_device.pageable', 1)" in seen["pageable"]
    assert (
        "('wait.stream', 1)" in seen["pageable"]
    )  # as on a device: torch waits for pageable memory
    assert seen["to host"] == "('copy.device_to_host', 1), ('copy.device_to_host.bytes', 16384)]"
    assert seen["wait"] == "('wait.device', 1)]"


@needs_null_gpu
@pytest.mark.distributed
def test_collectives_of_two_ranks_have_kind_and_bytes(tmp_path: Path) -> None:
    """What a host decides by arrives: objects by broadcast and by send, a vote by send and recv."""
    output = _run(
        tmp_path,
        """
        import torch
        import torch.distributed as dist

        dist.init_process_group("nccl", device_id=torch.device("cuda", int(__import__("os").environ["LOCAL_RANK"])))
        rank, peer = dist.get_rank(), 1 - dist.get_rank()
        torch.cuda.set_device(rank)
        dist.all_reduce(torch.ones(1000, device="cuda"))
        whole, part = torch.empty(2048, device="cuda", dtype=torch.bfloat16), torch.empty(1024, device="cuda", dtype=torch.bfloat16)
        dist.all_gather_into_tensor(whole, part)
        dist.reduce_scatter_tensor(part, whole)
        dist.all_to_all_single(whole, whole.clone())
        vote = torch.tensor([41], device="cuda")
        if rank:
            dist.send(vote, 0)
            dist.send_object_list([{"from": rank}], 0)
        else:
            vote.zero_()
            dist.recv(vote, 1)
            objects = [None]
            dist.recv_object_list(objects, 1)
            print(f"arrived {vote.item()} {objects}\\n", end="")
        told, all = [{"steps": 7}] if rank == 0 else [None], [None, None]
        dist.broadcast_object_list(told, 0)
        dist.all_gather_object(all, rank)
        sizes = torch.tensor([5, 6] if rank == 0 else [0, 0], device="cuda")
        dist.broadcast(sizes, 0)
        half = dist.split_group(split_ranks=[[0], [1]])
        print(f"rank {rank} was told {told} {sizes.tolist()} {all} alone {dist.get_world_size(half)}\\n", end="")
        dist.destroy_process_group()
        """,
        ranks=2,
    )
    assert "arrived 41 [{'from': 1}]" in output
    for rank, counts in _counts(tmp_path).items():
        assert f"rank {rank} was told [{{'steps': 7}}] [5, 6] [0, 1] alone 1" in output
        assert (counts["nccl.all_reduce"], counts["nccl.all_reduce.bytes"]) == (1, 4000)
        assert (counts["nccl.all_gather"], counts["nccl.all_gather.bytes"]) == (1, 2048)
        assert (counts["nccl.reduce_scatter"], counts["nccl.reduce_scatter.bytes"]) == (1, 2048)
        assert (counts["nccl.all_to_all"], counts["nccl.all_to_all.bytes"]) == (1, 4096)
    assert _counts(tmp_path)[1]["nccl.send.bytes"] == _counts(tmp_path)[0]["nccl.recv.bytes"] == 8


@needs_null_gpu
def test_a_wait_has_module_and_function(tmp_path: Path) -> None:
    """An `.item()` in a loop, waits by name, and one in the backward, whatever is done with warnings; copies to pinned
    memory are none."""
    (tmp_path / "lab.py").write_text(
        textwrap.dedent(
            """
            import logging, warnings
            import torch

            class Loop:
                def step(self, x):
                    return sum(x.sum().item() for _ in range(3))

            class Double(torch.autograd.Function):
                @staticmethod
                def forward(ctx, x):
                    return x * 2

                @staticmethod
                def backward(ctx, gradient):
                    gradient.nonzero()
                    return gradient * 2

            def drain():
                torch.cuda.synchronize()
                torch.accelerator.synchronize()
                for event in (torch.cuda.Event(), torch.Event("cuda")):
                    event.record()
                    event.synchronize()

            def be_quiet(x):
                with warnings.catch_warnings(record=True):
                    x.tolist()
                warnings.simplefilter("ignore")
                x.tolist()
                logging.captureWarnings(True)
                x.tolist()

            def read_later(x):
                return torch.empty(8, pin_memory=True).copy_(x, non_blocking=True)
            """
        )
    )
    _run(
        tmp_path,
        """
        import lab, torch

        x = torch.empty(8, device="cuda", requires_grad=True)
        lab.Loop().step(x)
        lab.drain()
        lab.be_quiet(x.detach())
        lab.Double.apply(x).sum().backward()
        lab.read_later(x.detach())
        """,
    )
    waits = device.read(tmp_path / "waits")[0]
    assert waits == {
        "lab:Loop.step.<genexpr>": 3,
        "lab:drain": 4,
        "lab:be_quiet": 3,
        "lab:Double.backward": 1,
    }


@needs_null_gpu
@pytest.mark.distributed
def test_the_example_of_the_page(tmp_path: Path) -> None:
    """DDP of torch on two ranks: a step sums its gradients in one collective and waits where its loss is read."""
    (tmp_path / "my_lab").mkdir()
    (tmp_path / "my_lab/train.py").write_text(
        textwrap.dedent(
            """
            import os, torch
            import torch.distributed as dist

            def log_loss(loss):
                print(loss.item())

            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
            dist.init_process_group("nccl", device_id=device)
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8, device=device))
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(3):
                loss = model(torch.ones(2, 8, device=device)).sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                log_loss(loss)
            dist.barrier()
            dist.destroy_process_group()
            """
        )
    )
    tables = {name: tmp_path / name for name in ("counts", "waits")}
    done = device.run(["-m", "my_lab.train"], ranks=2, cwd=tmp_path, **tables)
    assert done.returncode == 0, done.stderr[-3000:]
    counts, waits = (device.read(folder)[0] for folder in tables.values())
    assert counts["nccl.all_reduce"] == 3 + 1
    assert waits == {"my_lab.train:log_loss": 3, "my_lab.train:<module>": 1}  # the barrier
    assert not [name for name in counts if name.startswith("unknown.")]


@needs_null_gpu
def test_a_machine_may_have_no_device(tmp_path: Path) -> None:
    assert _run(tmp_path, "import torch; print(torch.cuda.device_count())", devices=0) == "0\n"


@needs_null_gpu
def test_memory_is_that_of_the_device(tmp_path: Path) -> None:
    """The allocator's peak is that of the tensors, a device of 80 GiB fits on this host, and not one byte more."""
    output = _run(
        tmp_path,
        """
        import ctypes, resource, torch

        nothing, cuda = ctypes.c_void_p(), ctypes.CDLL("libcuda.so.1")
        cuda.cudaMalloc(ctypes.byref(nothing), ctypes.c_size_t(0))
        cuda.cudaFree(nothing)
        tensors = [torch.empty(30 * 2**30, dtype=torch.uint8, device="cuda") for _ in range(2)]
        small = [torch.empty(1000, device="cuda") for _ in range(3)]
        del tensors[0]
        tensors.append(torch.zeros(4 * 2**30, dtype=torch.uint8, device="cuda"))
        stats = torch.cuda.memory_stats()
        print("peak", stats["allocated_bytes.all.peak"], "now", stats["allocated_bytes.all.current"])
        print("total", torch.cuda.mem_get_info()[1])
        try:
            torch.empty(51 * 2**30, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            print("refused", type(error).__name__)
        del tensors[:], small[:]
        torch.cuda.empty_cache()
        print("free", torch.cuda.mem_get_info()[0])
        print("resident GiB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
        """,
        memory_gib=80,
    )
    small = 3 * 4096  # of 4,000 bytes, in blocks of 512
    assert f"peak {60 * GIB + small} now {34 * GIB + small}" in output
    assert f"total {80 * GIB}" in output
    assert "refused OutOfMemoryError" in output
    assert f"free {80 * GIB}" in output
    assert float(output.split("resident GiB")[1].split()[0]) < 3


@needs_null_gpu
def test_symmetric_memory_is_rejected(tmp_path: Path) -> None:
    output = _run(
        tmp_path,
        """
        import torch
        from torch.distributed import _symmetric_memory

        try:
            _symmetric_memory.empty(4, device="cuda:0")
        except RuntimeError as error:
            print(error)
        """,
    )
    assert output.startswith("symmetric memory lies on GPUs that read one another")


@needs_null_gpu
def test_an_unknown_call_is_reported_once_and_counted(tmp_path: Path) -> None:
    output = _run(
        tmp_path,
        """
        import ctypes, torch

        torch.ones(1, device="cuda")
        for _ in range(3):
            ctypes.CDLL("libcuda.so.1").cuMulticastCreate(None, None)
        """,
    )
    assert output.count("null GPU: cuMulticastCreate ") == 1
    unknown = {name: times for name, times in _counts(tmp_path)[0].items() if "unknown" in name}
    assert unknown == {"unknown.cuMulticastCreate": 3}


@needs_null_gpu
def test_ends_without_destructors_and_forks_count_once(tmp_path: Path) -> None:
    _run(
        tmp_path,
        """
        import os, subprocess, torch

        x = torch.empty(4, device="cuda")
        x.add_(1)
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
        try:
            subprocess.run(["no-such-program"])  # a child of vfork, which ends in this process's memory
        except FileNotFoundError:
            pass
        x.sum().item()
        os._exit(0)
        """,
    )
    assert len(list((tmp_path / "counts").iterdir())) == 1
    assert _counts(tmp_path)[0]["launch"] == 2
    assert device.read(tmp_path / "waits")[0] == {"__main__:<module>": 1}


@needs_null_gpu
@pytest.mark.distributed
def test_no_process_and_no_file_is_left(tmp_path: Path) -> None:
    """Messages between ranks are files in memory; their folder ends with the process that started the ranks."""
    (tmp_path / "program.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))\n"
        "dist.init_process_group('nccl')\n"
        "dist.broadcast(torch.ones(4, device='cuda'), 0)\n"
        "print('folder', os.environ['NULL_GPU_MAIL'], os.listdir(os.environ['NULL_GPU_MAIL']))\n"
    )
    starter = f"from tests.null_gpu import device; print(device.run([{str(tmp_path / 'program.py')!r}], ranks=2).stdout)"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", starter], capture_output=True, text=True)
    folders = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("folder")}
    assert len(folders) == 1, done.stdout + done.stderr
    assert not Path(folders.pop()).exists()


@needs_null_gpu
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_command_keeps_its_exit_code_when_run_ends_it(tmp_path: Path, number: int) -> None:
    """A job that saves when it is told to end may do so; nothing of it is left behind."""
    (tmp_path / "program.py").write_text(
        "import os, signal, sys, time\n"
        "def end(*_):\n"
        "    time.sleep(1)\n"
        "    sys.exit(7)\n"
        "signal.signal(signal.SIGTERM, end), signal.signal(signal.SIGINT, end)\n"
        "print(os.environ['NULL_GPU_MAIL'], flush=True)\n"
        "time.sleep(100)\n"
    )
    command = ["-m", "tests.null_gpu", "run", "--", sys.executable, str(tmp_path / "program.py")]
    run = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert run.stdout is not None
    mail = Path(run.stdout.readline().strip())
    assert mail.is_dir()
    if number == signal.SIGINT:  # of a terminal
        os.killpg(run.pid, number)
    else:
        run.send_signal(number)
    assert run.wait(60) == 7
    assert not mail.exists()
