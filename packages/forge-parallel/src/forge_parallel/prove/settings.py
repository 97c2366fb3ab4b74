"""Settings of a proof: device, precision, deterministic kernels, and the bounds on errors with their reasons."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from forge_parallel._shared.problems import WithProblems, invalid

PRECISIONS = ("fp32", "tf32", "bf16")
QUANTITIES = ("stream", "loss", "gradient", "norm", "weight", "text")
ONE_RANK = "one rank"
"""Quantity in `Result.errors` for every value compared with one rank in bf16."""
ON_CPU = "CPU"
"""Bound on one process on a GPU compared with one process on the CPU."""

# fp32: both sides compute the same sums in another order. The unit roundoff is 2^-24 = 6e-8, the sums have some
# hundred terms; over all measured models the largest error is 1e-6.
FP32_BOUND = 1e-5
# bf16 compared with fp32. bf16 has 8 significant bits: unit roundoff 2^-8 = 4e-3, half of it on average. An entry of a
# gradient passes some 20 roundings in two layers, which add up like a random walk, and the worst of some thousand is four
# to five times that; loss and norm are sums in which most of it cancels. Changes of weights are sums of gradients.
# Measured over 18 models of 2 to 8 layers, 2 or 3 seeds: 2e-2, 4e-4, 9e-2, 2e-3 and 8e-2.
BF16_BOUNDS = {"stream": 4e-2, "loss": 2e-3, "gradient": 0.15, "norm": 1e-2, "weight": 0.15}
# Rounding of large gradients reaches small ones: the scores of a nearly uniform attention have gradients of 1e-4 of the
# largest, and those of a right model were off by 0.34. So a tensor is measured by at least this fraction of the largest;
# an error below 0.15 x 1e-3 of the largest tensor is not seen.
MIN_SCALE = 1e-3
# bf16 compared with one rank in bf16, in the first step: equal weights, micro-batches and roundings, so only sums over
# micro-batches and ranks in fp32 differ (measured: 2e-7). A sum kept in bf16 is off by 2^-9 = 2e-3. Later steps are not
# compared: a weight that differs in its last fp32 bit may round to the other bf16 number (measured: 7e-3).
ONE_RANK_BOUND = 1e-4
# TF32 rounds only the factors of matmuls, to 11 significant bits: unit roundoff 2^-11, an eighth of bf16's. Emulated on
# a CPU over nine models: stream 1e-3, loss 1e-5, gradient 7e-3, norm 1e-4.
TF32_BOUNDS = {quantity: bound / 8 for quantity, bound in BF16_BOUNDS.items()}
# A GPU and a CPU sum in different orders and have different exponentials. Over the same models fp32 on a CPU is at most
# 6e-5 away from fp64, so two devices are up to 1.2e-4 apart; TF32 instead of fp32 would show 6e-4 or more.
CPU_BOUND = 3e-4

_BOUNDS = {
    "fp32": dict.fromkeys(QUANTITIES, FP32_BOUND),
    "tf32": TF32_BOUNDS,
    "bf16": BF16_BOUNDS,
}


class ProveError(WithProblems, ValueError):
    """This model, layout or device cannot be proved."""


#: `raise prove_error(key, code, value, rule, fix)`: a ProveError with this one problem.
prove_error = partial(invalid, kind=ProveError)


@dataclass(frozen=True)
class ProofSettings:
    """Device and precision of the ranks, and a bound on the errors of each quantity.

    In tf32 and bf16 generated text is not compared: two tokens of nearly equal probability may change places.
    """

    device: str = "cpu"
    precision: str = "fp32"
    bounds: Mapping[str, float] = field(default_factory=dict)

    @property
    def min_scale(self) -> float:
        """Least scale of a tensor's error, as a fraction of the largest tensor of its quantity."""
        return 0.0 if self.precision == "fp32" else MIN_SCALE

    @property
    def compile_backend(self) -> str:
        """inductor on GPUs, which proves the kernels of a run too; aot_eager on a CPU, which proves the graph breaks."""
        return "inductor" if self.device == "cuda" else "aot_eager"


@dataclass(frozen=True)
class Devices:
    """The GPUs of this machine: their count, distinct names, and the version of NCCL."""

    count: int
    names: tuple[str, ...]
    nccl: str


def make_settings(device: str, precision: str, tolerance: float | None) -> ProofSettings:
    """Validate the options of a proof. Raises ProveError for an unknown device or precision, one that this process
    cannot have, and a tolerance that is not positive."""
    if device not in ("cpu", "cuda"):
        raise prove_error("device", "unknown", device, "must be cpu or cuda", "use cpu")
    if precision not in PRECISIONS:
        rule = f"must be one of {', '.join(PRECISIONS)}"
        raise prove_error("precision", "unknown", precision, rule, "use fp32")
    if precision == "tf32" and device == "cpu":
        rule, fix = "requires a GPU, and device is cpu", "use fp32, or device cuda"
        raise prove_error("precision", "requires", precision, rule, fix)
    if tolerance is not None and not 0 < tolerance < math.inf:
        rule, fix = "must be above 0 and finite", "leave it out for the bounds of the precision"
        raise prove_error("tolerance", "finite", tolerance, rule, fix)

    if device == "cuda" and torch.version.cuda is None:
        rule = f"requires a CUDA build of torch, and {torch.__version__} is not one"
        raise prove_error("device", "build", device, rule, "install one, or use cpu")
    if device == "cuda":
        require_no_cuda()
    bounds = {**_BOUNDS[precision], ONE_RANK: ONE_RANK_BOUND, ON_CPU: CPU_BOUND}
    return ProofSettings(
        device, precision, bounds if tolerance is None else dict.fromkeys(bounds, tolerance)
    )


def require_no_cuda() -> None:
    """Raise ProveError if this process has used CUDA: a forked rank could not use it again."""
    if torch.cuda.is_initialized():
        rule = "must not have been used by this process or a module that it imported, as ranks are forked from it"
        fix = "run python -m forge_parallel.prove in its own process, and use CUDA only inside functions"
        raise prove_error("CUDA", "initialized", ..., rule, fix)


def find_devices() -> Devices:
    """Return the GPUs of this machine. Initializes CUDA in this process."""
    count = torch.cuda.device_count()
    names = tuple(dict.fromkeys(torch.cuda.get_device_name(i) for i in range(count)))
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if count else ""
    return Devices(count, names, nccl)


def make_deterministic() -> None:
    """Choose kernels that give the same bits in each run, where torch has them. Call it before the first matmul.

    `use_deterministic_algorithms` also fills uninitialized memory with nan, so a read of it is red.
    """
    # cuBLAS then adds in one order on all streams
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward adds in any order
    torch.backends.cudnn.benchmark = False
    allow_tf32(False)


def allow_tf32(allowed: bool) -> None:
    """Set whether fp32 matmuls on a GPU may round their factors to 11 bits."""
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


def describe_settings(settings: ProofSettings, devices: Devices | None, compiles: bool) -> str:
    """Return one line: device, versions, precision, kernels, bounds. `devices` is None on the CPU."""
    parts = ["device cpu", f"torch {torch.__version__}", "gloo", f"precision {settings.precision}"]
    if devices is not None:
        parts[0] = f"device cuda ({devices.count} x {', '.join(devices.names)})"
        parts[2] = f"NCCL {devices.nccl}"
        parts += [f"TF32 {'on' if settings.precision == 'tf32' else 'off'}"]
    parts += ["deterministic algorithms"]
    if devices is not None:
        parts += ["CUBLAS_WORKSPACE_CONFIG :4096:8", "SDPA flash, efficient or math"]
    if compiles:
        parts += [f"compiled by {settings.compile_backend}"]

    # quantities with equal bounds share an entry
    used = {
        ONE_RANK: settings.precision == "bf16",
        ON_CPU: devices is not None,
    }
    groups: dict[float, list[str]] = {}
    for name, bound in settings.bounds.items():
        if used.get(name, True):
            groups.setdefault(bound, []).append(name)
    if len(groups) == 1:
        bounds = f"bound {next(iter(groups)):g}"
    else:
        texts = (f"{' '.join(names)} {bound:g}" for bound, names in groups.items())
        bounds = f"bounds {', '.join(texts)}"
    return f"{', '.join(parts)}; {bounds}"
