"""A CUDA device that computes nothing: torch's CUDA build on a machine without a GPU or driver.

    build()                                                     # the libraries, once per torch
    done = run(["-m", "forge_train", "run", "job.toml"], ranks=2, counts=folder)
    read(folder)[0]["nccl.all_reduce"]                          # made by rank 0

A library that is loaded before all others stands in for the CUDA runtime and driver, cuBLAS, cuDNN, NCCL and NVRTC.
Device memory is host memory, kernels do nothing; torch's dispatcher, allocator, autograd, process groups, compiler and Triton
are the real ones. docs/null-gpu.md says what that can show and what it cannot.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from . import stubs

_HERE = Path(__file__).parent
_SOURCE = _HERE / "source"
_CUDA = "13"  # the major version whose calls the sources know
_WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter")


class Unavailable(RuntimeError):
    """No null GPU can be built or used here; the message says what is missing."""


def build(python: str | Path = sys.executable, folder: Path | None = None) -> Path:
    """Compile the libraries for the torch of `python` and return their folder.

    Takes 10 seconds, once: the default folder is in the environment of `python`, and named by torch's version and the
    sources. Raises `Unavailable` without a CUDA build of torch, its headers, or gcc and nm.
    """
    torch, site, prefix = _torch_of(str(python))
    digest = hashlib.sha256(torch.encode())
    for path in sorted([*_SOURCE.iterdir(), _HERE / "stubs.py"]):
        digest.update(path.read_bytes())
    folder = folder or prefix / "null-gpu" / digest.hexdigest()[:16]
    mark = folder / "built"  # written last
    if mark.exists() and mark.read_text() == digest.hexdigest():
        return folder
    for tool in ("gcc", "nm"):
        if not shutil.which(tool):
            raise Unavailable(f"{tool} is not on the PATH; the null GPU is compiled on first use: install gcc and binutils")  # fmt: skip
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        made = Path(name) / "made"
        made.mkdir()
        _compile(made, site)
        (made / mark.name).write_text(digest.hexdigest())
        if not (mark.exists() and mark.read_text() == digest.hexdigest()):  # by another process
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
    return folder


def environment(
    *,
    devices: int = 1,
    folder: Path | None = None,
    waits: Path | None = None,
    counts: Path | None = None,
    skip_copies_above: int | None = None,
    memory_gib: float | None = None,
    name: str | None = None,
) -> dict[str, str]:
    """Variables of a process on the null GPU, to be added to `os.environ`; its children inherit them.

    `folder` holds the libraries (default: built for this Python). In the folders `waits` and `counts` each process
    that used a device leaves a table at its end; `read` returns them. Copies to the host of more than `skip_copies_above`
    bytes leave their target alone (a model of 80 GB need not exist on the host). Devices have `memory_gib` (139.8)
    and are called `name` ("NVIDIA H200").
    """
    if not 0 <= devices <= 64:
        raise ValueError(f"devices is {devices}; the null GPU has 0 to 64")
    folder = folder or build()
    given = {
        "LD_PRELOAD": _joined(folder / "libcuda.so.1", folder / "libnvrtc.so", "LD_PRELOAD"),
        "PYTHONPATH": _joined(_HERE / "shim", "PYTHONPATH"),
        "TRITON_LIBCUDA_PATH": str(folder),
        "NULL_GPU_MAIL": _mail(),
        "NULL_GPU_DEVICES": str(devices),
    }
    for variable, value in {"NULL_GPU_WAITS": waits, "NULL_GPU_COUNTS": counts}.items():
        if value is not None:
            value.mkdir(parents=True, exist_ok=True)
            given[variable] = str(value.resolve())
    if skip_copies_above is not None:
        given["NULL_GPU_SKIP_COPIES_ABOVE"] = str(skip_copies_above)
    if memory_gib is not None:
        given["NULL_GPU_MEMORY"] = str(int(memory_gib * 2**30))
    if name is not None:
        given["NULL_GPU_NAME"] = name
    return given


def run(
    arguments: list[str],
    *,
    ranks: int = 1,
    timeout: float = 600,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    python: str | Path = sys.executable,
    devices: int | None = None,
    folder: Path | None = None,
    waits: Path | None = None,
    counts: Path | None = None,
    skip_copies_above: int | None = None,
    memory_gib: float | None = None,
    name: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS` on the null GPU, its output captured; with `ranks` > 1 so many processes, each with a device.

    `env` is added to this process's variables. Raises subprocess.TimeoutExpired after `timeout` seconds.
    """
    variables = environment(
        devices=ranks if devices is None else devices,
        folder=folder or build(python),
        waits=waits,
        counts=counts,
        skip_copies_above=skip_copies_above,
        memory_gib=memory_gib,
        name=name,
    )
    command = launched([str(python), *arguments], ranks, python)
    full = {"OMP_NUM_THREADS": "1", **os.environ, **variables, **(env or {})}
    return subprocess.run(
        command, env=full, cwd=cwd, timeout=timeout, capture_output=True, text=True, check=False
    )


def launched(command: list[str], ranks: int, python: str | Path = sys.executable) -> list[str]:
    """A command that starts `ranks` processes of a command by torch's launcher; one is the command itself."""
    if ranks == 1:
        return command
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [str(python), *launcher, "--no-python", *command]


def read(folder: Path) -> dict[int, Counter[str]]:
    """Tables of a folder of `counts` or `waits`, by rank; processes of one rank are added."""
    tables: dict[int, Counter[str]] = {}
    for path in sorted(folder.glob("rank-*.json")):
        rank = int(path.name.split(".")[0].removeprefix("rank-"))
        tables.setdefault(rank, Counter()).update(json.loads(path.read_text()))
    return tables


def counted() -> Counter[str]:
    """Counts of this process so far, for differences; the process runs on the null GPU."""
    library = ctypes.CDLL("libcuda.so.1")  # the one that is loaded
    library.null_gpu_counts.restype = ctypes.c_size_t
    text = ctypes.create_string_buffer(1 << 16)
    library.null_gpu_counts(text, ctypes.c_size_t(len(text)))
    return Counter(json.loads(text.value))


def why_not(python: str | Path = sys.executable) -> str:
    """Why no null GPU can be used here; empty if one can."""
    try:
        build(python)
    except Unavailable as error:
        return str(error)
    return ""


@functools.cache
def _torch_of(python: str) -> tuple[str, Path, Path]:
    """Version of the torch of an interpreter, its site-packages, and the interpreter's prefix; torch is not imported."""
    code = (
        "import importlib.util as u, sys; print(u.find_spec('torch').origin, sys.prefix, sep='\\n')"
    )
    found = subprocess.run([python, "-c", code], capture_output=True, text=True)
    if found.returncode:
        raise Unavailable(f"{python} has no torch; install its CUDA build: pip install 'torch===2.13.0'")  # fmt: skip
    origin, prefix = found.stdout.splitlines()
    torch = Path(origin).parent
    values: dict[str, str | None] = {}
    exec((torch / "version.py").read_text(), values)
    version, cuda = values["__version__"], values["cuda"]
    if not cuda or cuda.split(".")[0] != _CUDA:
        built = f"for CUDA {cuda}" if cuda else "for CPUs"
        raise Unavailable(f"torch {version} is built {built}; the null GPU needs a build for CUDA {_CUDA}: `hatch run null-gpu`, or pip install 'torch===2.13.0' from PyPI")  # fmt: skip
    return f"{version} {cuda}", torch.parent, Path(prefix)


def _compile(folder: Path, site: Path) -> None:
    headers = [site / "nvidia" / part / "include" for part in (f"cu{_CUDA}", "nccl", "cudnn")]
    headers.append(site / "triton/backends/nvidia/include")  # crt/, which the wheels of CUDA lack
    if missing := [path for path in headers if not path.is_dir()]:
        raise Unavailable(f"{missing[0]} is missing; the null GPU is checked against the headers of CUDA: install torch with its dependencies, not --no-deps")  # fmt: skip
    # arithmetic of half precision wants headers that the wheels lack, and no call here
    includes = ["-D__CUDA_FP16_H__", "-D__CUDA_BF16_H__", f"-I{_SOURCE}"]
    includes += [f"-isystem{path}" for path in headers]
    common = ["gcc", "-O1", "-shared", "-fPIC", "-fno-builtin", "-fvisibility=hidden"]
    own = sorted(set(_SOURCE.glob("*.c")) - {_SOURCE / "nvrtc.c"})
    cuda, partial = folder / "libcuda.so.1", folder / "own.so"
    _gcc([*common, *_WARNINGS, *includes, *own, "-o", partial])
    wanted = stubs.imported((site / "torch/lib").glob("lib*.so"))
    wanted |= stubs.of_the_driver(headers[0] / "cuda.h")
    stubs.write(folder / "stubs.c", wanted, stubs.defined(partial))
    _gcc([*common, *includes, *own, folder / "stubs.c", "-o", cuda, f"-Wl,-soname,{cuda.name}"])
    (folder / "libcuda.so").symlink_to(cuda.name)  # what Triton links
    nvrtc: list[str | Path] = [
        f"-DCUDA_MAJOR={_CUDA}",
        _SOURCE / "nvrtc.c",
        "-o",
        folder / "libnvrtc.so",
    ]
    _gcc([*common, *_WARNINGS, *includes, *nvrtc, f"-Wl,-soname,libnvrtc.so.{_CUDA}"])
    partial.unlink()


def _gcc(command: Sequence[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(f"gcc cannot compile the null GPU for this torch: {done.stderr}")


@functools.cache
def _mail() -> str:
    """A folder for messages between ranks, in memory, until this process ends; those of killed processes go first."""
    shared = Path("/dev/shm")
    parent = shared if shared.is_dir() else Path(tempfile.gettempdir())
    for path in parent.glob("null-gpu-*-*"):
        if not Path("/proc", path.name.split("-")[2]).exists():
            shutil.rmtree(path, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix=f"null-gpu-{os.getpid()}-", dir=parent)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _joined(*parts: Path | str) -> str:
    """Paths, and what the variable named last holds already."""
    *paths, variable = parts
    before = os.environ.get(str(variable), "")
    fresh = [str(path) for path in paths if str(path) not in before.split(":")]
    return ":".join([*fresh, *([before] if before else [])])
