"""Generated definitions of every function of CUDA's libraries that torch or Triton may call and `source/` lacks.

Products of cuBLAS are counted and succeed. All else counts as unknown: it succeeds too, and its first call is reported.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

# What the null GPU stands in for. cuFFT, cuSPARSE and cuRAND stay as they are: they call the runtime, which it is.
_FAMILIES = re.compile(r"(__)?cuda[A-Z]|cu[A-Z]|cublas|nccl|cudnn|cusolver")
_NOT = re.compile(r"cuFile|cupti")
_PRODUCT = re.compile(r"cublas(([SDCZ]|I[sdcz]|Dz|Sc|Cs|Zd)[a-z]\w*|Gemm\w*|LtMatmul)$")

_HEAD = """\
#include "null_gpu.h"
#define PRODUCT(name) EXPORT long name(void) { count(BLAS, 0); return 0; }
#define UNKNOWN(name) EXPORT long name(void) { static struct stub stub = {#name, 0, 0}; return call_unknown(&stub); }
"""


def defined(library: Path) -> set[str]:
    """Names that a shared library or object defines for others."""
    return set(re.findall(r" [TWVi] (\w+)", _names(library)))


def imported(libraries: Iterable[Path]) -> set[str]:
    """Names of the families above that shared libraries want from others."""
    names = {name for path in libraries for name in re.findall(r" U (\w+)", _names(path))}
    return {name for name in names if _FAMILIES.match(name) and not _NOT.match(name)}


def of_the_driver(header: Path) -> set[str]:
    """Functions of `cuda.h`: Triton and torch look them up by name, so no import table lists them."""
    return set(re.findall(r"CUDAAPI\s+(cu[A-Z]\w+)\s*\(", header.read_text()))


def write(path: Path, wanted: set[str], own: set[str]) -> None:
    """C source of stubs for the wanted names but our own, in whichever version (`cuX` and `cuX_v2` are one function)."""
    ours = {name.removesuffix("_v2") for name in own}
    names = sorted(
        name for name in wanted if name not in own and name.removesuffix("_v2") not in ours
    )
    lines = (f"{'PRODUCT' if _PRODUCT.match(name) else 'UNKNOWN'}({name})\n" for name in names)
    path.write_text(_HEAD + "".join(lines))


def _names(library: Path) -> str:
    return subprocess.run(["nm", "-D", library], capture_output=True, text=True, check=True).stdout
