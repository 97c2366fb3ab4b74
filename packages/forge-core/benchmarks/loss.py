"""Losses of a linear head, forward and backward: seconds, and memory at its peak.

    python packages/forge-core/benchmarks/loss.py --vocab 32000 128000 --dtypes fp32 bf16

`fused` is `fused_cross_entropy`, `blockwise` is `cross_entropy` of whole logits; both also with z-loss and label
smoothing. Others: `F.linear` with `F.cross_entropy` of fp32 logits (`plain`), and where torch has it
`F.linear_cross_entropy` as it is and in its chunks. Sums and gradients are compared with `plain` first:
`difference`, the largest max|a - b| / max|b|.

`seconds` (on a CPU of the processor, whatever else runs there: use one thread) and `over_plain`, the ratio to
plain within a round, come from interleaved rounds. `peak_bytes` is what
a step needs beyond what was there before it, both gradients included, in a process of its own: on a CPU resident
memory, scratch memory of kernels included, on a GPU what torch has allocated. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import harness
import torch
import torch.nn.functional as F
from torch import Tensor

from forge_core.loss import cross_entropy, fused_cross_entropy

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TERMS: dict[str, Any] = {"z_loss": 1e-4, "label_smoothing": 0.1}
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def losses() -> dict[str, Loss]:
    """Sums of (N, D), (V, D) and labels (N,) by name."""
    found: dict[str, Loss] = {
        "plain": lambda x, w, y: F.cross_entropy(F.linear(x, w).float(), y, reduction="sum"),
        "blockwise": lambda x, w, y: cross_entropy(F.linear(x, w), y).sum,
        "blockwise_terms": lambda x, w, y: cross_entropy(F.linear(x, w), y, **TERMS).sum,
        "fused": lambda x, w, y: fused_cross_entropy(x, w, y).sum,
        "fused_terms": lambda x, w, y: fused_cross_entropy(x, w, y, **TERMS).sum,
    }
    torch_own = getattr(F, "linear_cross_entropy", None)
    if torch_own is not None:
        found["torch"] = lambda x, w, y: torch_own(x, w, y, reduction="sum")
        options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
        if options is not None:
            found["torch_chunked"] = lambda x, w, y: torch_own(
                x, w, y, reduction="sum", options=options()
            )
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--vocab", type=int, nargs="+", default=[32_000, 128_000])
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--only", nargs="+", choices=list(losses()), default=list(losses()))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads of torch")
    parser.add_argument("--memory", choices=list(losses()), help="print the peak of one loss alone")
    return parser.parse_args()


def inputs(args: argparse.Namespace, vocab: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(args.tokens, args.dim, generator=generator)
    weight = torch.randn(vocab, args.dim, generator=generator).mul_(args.dim**-0.5)
    labels = torch.randint(0, vocab, (args.tokens,), generator=generator)
    leaves = (x.to(args.device, dtype), weight.to(args.device, dtype))
    return (*(leaf.requires_grad_() for leaf in leaves), labels.to(args.device))


def step(loss: Loss, given: tuple[Tensor, ...]) -> Tensor:
    """One forward and backward; returns the sum."""
    for leaf in given[:2]:
        leaf.grad = None
    total = loss(*given) / len(given[2])
    total.backward()
    return total.detach()


def peak(args: argparse.Namespace) -> int:
    """Bytes of one step of `args.memory`, after a small one has loaded what every first one loads."""
    loss, dtype = losses()[args.memory], DTYPES[args.dtypes[0]]
    small = argparse.Namespace(**{**vars(args), "tokens": 8})
    step(loss, inputs(small, 64, dtype))
    given = inputs(args, args.vocab[0], dtype)
    device = torch.device(args.device)
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        return (harness.peak_memory(lambda: step(loss, given), device) or 0) - before
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    step(loss, given)
    return resident("VmHWM") - before


def resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))


def peak_apart(name: str, vocab: int, dtype: str) -> int:
    """`peak` in a process of its own."""
    also = ["--memory", name, "--vocab", str(vocab), "--dtypes", dtype]
    command = [sys.executable, *sys.argv, *also]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def difference(loss: Loss, plain: Loss, given: tuple[Tensor, ...]) -> float:
    found = []
    for each in (loss, plain):
        total = step(each, given)
        found.append([total, *(leaf.grad for leaf in given[:2])])
    pairs = [(a.double(), b.double()) for a, b in zip(*found, strict=True) if b is not None]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def case(args: argparse.Namespace, vocab: int, dtype: str) -> dict[str, Any]:
    given = inputs(args, vocab, DTYPES[dtype])
    chosen = {name: loss for name, loss in losses().items() if name in args.only}
    plain = losses()["plain"]
    rows: dict[str, Any] = {name: {} for name in chosen}
    for name, loss in chosen.items():
        rows[name]["peak_bytes"] = peak_apart(name, vocab, dtype)
        if "terms" not in name:
            rows[name]["difference"] = difference(loss, plain, given)
    steps = {name: lambda loss=loss: step(loss, given) for name, loss in chosen.items()}
    clock = time.process_time if args.device == "cpu" else time.perf_counter
    seconds = harness.interleave(steps, args.rounds, args.warmup, torch.device(args.device), clock)
    for name, times in seconds.items():
        rows[name]["seconds"] = harness.spread(times)
        if "plain" in seconds:
            rows[name]["over_plain"] = harness.ratios(times, seconds["plain"])
            rows[name]["peak_over_plain"] = rows[name]["peak_bytes"] / rows["plain"]["peak_bytes"]
    return {"vocab": vocab, "dtype": dtype, "losses": rows}


def main() -> None:
    args = arguments()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    if args.memory:
        print(json.dumps(peak(args)))
        return
    cases = [case(args, vocab, dtype) for vocab in args.vocab for dtype in args.dtypes]
    harness.emit("loss", torch.device(args.device), tokens=args.tokens, dim=args.dim, cases=cases)


if __name__ == "__main__":
    main()
