"""How the processes of a proof compute: device, precision, deterministic settings, and the bounds on errors."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from forge_parallel._shared.problems import WithProblems, invalid

PRECISIONS = ("fp32", "tf32", "bf16")
QUANTITIES = ("stream", "loss", "gradient", "norm", "weight", "text")
ONE_RANK = "one rank"
"""The quantity in `Result.errors` for all that is compared with one rank in bf16."""
ON_CPU = "CPU"
"""The bound of one process on a GPU compared with one on the CPU."""

# fp32: both sides compute the same sums in another order. The unit roundoff is 2^-24 = 6e-8, the sums have some
# hundred terms; over the models that we know the largest error is 1e-6.
FP32_BOUND = 1e-5
# bf16 against fp32. bf16 has 8 significant bits: unit roundoff 2^-8 = 4e-3, half of it on average. An entry of a gradient
# passes some 20 roundings in a row in two layers, which add up like a random walk, and the worst of some thousand is
# four to five times that; loss and norm are sums in which most of it cancels. Changes of weights are nothing but
# gradients. Measured over 18 models of 2 to 8 layers, 2 or 3 seeds: 2e-2, 4e-4, 9e-2, 2e-3 and 8e-2.
BF16_BOUNDS = {"stream": 4e-2, "loss": 2e-3, "gradient": 0.15, "norm": 1e-2, "weight": 0.15}
# Rounding of large gradients reaches small ones: the scores of an attention that is nearly uniform have gradients of 1e-4
# of the largest, and a right model's were off by 0.34. All of a tensor may be lost unseen below 0.15 x 1e-3 of the largest.
SMALL = 1e-3
# bf16 beside one rank in bf16, in the first step: equal weights, micro-batches and roundings, so what is left are sums
# over micro-batches and ranks in fp32 (measured: 2e-7). A sum that is kept in bf16 is off by 2^-9 = 2e-3. Later steps are
# not compared: a weight that differs in its last fp32 bit may round to the other bf16 number (measured: 7e-3).
ONE_RANK_BOUND = 1e-4
# TF32 rounds the factors of products alone, to 11 significant bits: unit roundoff 2^-11, an eighth of bf16's. Emulated on
# a CPU over nine models: stream 1e-3, loss 1e-5, gradient 7e-3, norm 1e-4.
TF32_BOUNDS = {quantity: bound / 8 for quantity, bound in BF16_BOUNDS.items()}
# A GPU and a CPU have other orders of sums and other exponentials. Of the same models fp32 on a CPU is at most 6e-5
# away from fp64, so two devices are 1.2e-4 apart; TF32 where fp32 was asked for would show 6e-4 or more.
CPU_BOUND = 3e-4


class ProveError(WithProblems, ValueError):
    """This model, layout or device cannot be proved."""


@dataclass(frozen=True)
class Settings:
    """Device and precision of the ranks, and a bound on the errors of each quantity.

    In tf32 and bf16 texts are not compared: two tokens that are as probable but for rounding may change places.
    """

    device: str = "cpu"
    precision: str = "fp32"
    bounds: Mapping[str, float] = field(default_factory=dict)

    @property
    def small(self) -> float:
        """Of the largest tensor of a kind: smaller ones are measured by it."""
        return 0.0 if self.precision == "fp32" else SMALL

    @property
    def compile_backend(self) -> str:
        """On GPUs the kernels that runs use are proved, too; on a CPU our cuts around the graphs."""
        return "inductor" if self.device == "cuda" else "aot_eager"


@dataclass(frozen=True)
class Facts:
    """About the devices of this machine."""

    count: int
    names: tuple[str, ...]
    nccl: str


def make_settings(device: str, precision: str, bound: float | None) -> Settings:
    """ProveError for a device or precision that is none, or that this process cannot have."""
    if device not in ("cpu", "cuda"):
        raise invalid(
            "device", "unknown", device, "must be cpu or cuda", "use cpu", kind=ProveError
        )
    if precision not in PRECISIONS:
        rule = f"must be one of {', '.join(PRECISIONS)}"
        raise invalid("precision", "unknown", precision, rule, "use fp32", kind=ProveError)
    if precision == "tf32" and device == "cpu":
        rule, fix = "must have a GPU, and device is cpu", "use fp32, or device cuda"
        raise invalid("precision", "requires", precision, rule, fix, kind=ProveError)
    if bound is not None and not 0 < bound < math.inf:
        fix = "leave it out for those of the precision"
        raise invalid("bound", "finite", bound, "must be above 0 and finite", fix, kind=ProveError)
    if device == "cuda" and torch.version.cuda is None:
        rule = f"must have a CUDA build of torch, and {torch.__version__} is not one"
        raise invalid("device", "build", device, rule, "install one, or use cpu", kind=ProveError)
    if device == "cuda":
        require_no_cuda()
    bounds = {
        "fp32": dict.fromkeys(QUANTITIES, FP32_BOUND),
        "tf32": TF32_BOUNDS,
        "bf16": BF16_BOUNDS,
    }
    chosen = {**bounds[precision], ONE_RANK: ONE_RANK_BOUND, ON_CPU: CPU_BOUND}
    if bound is not None:
        chosen = dict.fromkeys(chosen, bound)
    return Settings(device, precision, chosen)


def require_no_cuda() -> None:
    """ProveError if this process has used CUDA, which no fork of it can use again."""
    if torch.cuda.is_initialized():
        rule = "must not have been used by this process or a module that it imported, as ranks are forked from it"
        fix = "prove in a process of its own (python -m forge_parallel.prove), and use CUDA inside of functions"
        raise invalid("CUDA", "initialized", ..., rule, fix, kind=ProveError)


def find_devices() -> Facts:
    """Of this process, which uses CUDA for it."""
    count = torch.cuda.device_count()
    names = tuple(dict.fromkeys(torch.cuda.get_device_name(i) for i in range(count)))
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if count else ""
    return Facts(count, names, nccl)


def make_deterministic() -> None:
    """In a rank, before its first product: the same bits in each run where torch has such kernels. Memory that nobody
    wrote is nan."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = (
        ":4096:8"  # cuBLAS then adds in one order on all streams
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward adds in any order
    torch.backends.cudnn.benchmark = False
    allow_tf32(False)


def allow_tf32(allowed: bool) -> None:
    """Whether products of fp32 on a GPU may round their factors to 11 bits."""
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


def describe(settings: Settings, facts: Facts | None, compiles: bool) -> str:
    """One line: device, versions, settings, bounds."""
    where, sends = "cpu", "gloo"
    if facts is not None:
        where, sends = f"cuda ({facts.count} x {', '.join(facts.names)})", f"NCCL {facts.nccl}"
    parts = [f"device {where}", f"torch {torch.__version__}", sends]
    parts += [f"precision {settings.precision}"]
    if facts is not None:
        parts += [f"TF32 {'on' if settings.precision == 'tf32' else 'off'}"]
    parts += ["deterministic algorithms"]
    if facts is not None:
        parts += ["CUBLAS_WORKSPACE_CONFIG :4096:8", "SDPA flash, efficient or math"]
    if compiles:
        parts += [f"compiled by {settings.compile_backend}"]
    return ", ".join(parts) + "; " + _bounds(settings, facts is not None)


def _bounds(settings: Settings, on_gpu: bool) -> str:
    used = {q: b for q, b in settings.bounds.items() if q in QUANTITIES}
    if settings.precision == "bf16":
        used[ONE_RANK] = settings.bounds[ONE_RANK]
    if on_gpu:
        used[ON_CPU] = settings.bounds[ON_CPU]
    groups: dict[float, list[str]] = {}
    for name, bound in used.items():
        groups.setdefault(bound, []).append(name)
    if len(groups) == 1:
        return f"bound {next(iter(groups)):g}"
    return "bounds " + ", ".join(f"{' '.join(names)} {bound:g}" for bound, names in groups.items())
