"""`python -m forge_parallel.prove --device cuda` on the null GPU: every cell reaches its end.

Numbers cannot be compared there: a cell that is red by them is as good as one that is green. Each cell is run on null GPUs and,
by gloo, on the CPU, and must compare the same values on both and make as many collectives of each kind. Kernels launched
per rank are those of docs/data/null-gpu-proofs.json, which `--write` renews after a look at the difference.

    hatch run null-gpu proofs                          # all; minutes, most of them for the cells that compile
    hatch run null-gpu proofs --run "llama fp32" --only tp
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.null_gpu import device
from torch import nn

KEPT = Path(__file__).parents[2] / "docs/data/null-gpu-proofs.json"
WORLD, VOCAB, SECONDS = 8, 64, 900.0
#: Calls of torch's process groups -> NCCL's. All of prove's are one to one; what NCCL makes of several is not among them.
KINDS = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "recv",
}
LAUNCHES = ("launch", "launch.triton", "blas")


def own() -> nn.Module:
    from forge_core import Transformer, TransformerConfig

    return Transformer(TransformerConfig(vocab_size=VOCAB, dim=32, num_layers=2, num_heads=4))


def llama() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


RUNS = {"own fp32": (own, "fp32"), "own bf16": (own, "bf16"), "llama fp32": (llama, "fp32")}
Cells = dict[str, dict[str, Any]]


def main(argv: Sequence[str] | None = None) -> int:
    """1 if a cell did not reach its end, made other collectives than on the CPU, or launched other kernels than before."""
    parser = argparse.ArgumentParser(prog="hatch run null-gpu proofs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--run", choices=RUNS, help="only this run")
    parser.add_argument("--only", default="", help="cells named so")
    parser.add_argument("--write", action="store_true", help="keep its launches")
    parser.add_argument("--inside", nargs=2, metavar=("device", "folder"), help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.inside:
        return _inside(given.run, given.only, *given.inside)
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    found = kept if given.run or given.only else {}  # a part leaves the rest as it is
    wrong = []
    for run in [given.run] if given.run else RUNS:
        cells, problems = _compare(_cells(run, given.only, "cuda"), _cells(run, given.only, "cpu"))
        if not given.write:
            problems += _changes(cells, kept.get("runs", {}).get(run, {}))
        found.setdefault("runs", {}).setdefault(run, {}).update(cells)
        wrong += [f"{run}, {problem}" for problem in problems]
        print(f"{run}: {len(cells)} cells", flush=True)
    for problem in wrong:
        print(problem, file=sys.stderr)
    if given.write and not wrong:
        found["torch"] = torch.__version__
        KEPT.write_text(_as_text(found))
    return int(bool(wrong))


def _compare(on_gpu: Cells, on_cpu: Cells) -> tuple[Cells, list[str]]:
    """What to keep of each cell, and sentences on those that did not end, or not as on the CPU."""
    kept: Cells = {}
    problems = [f"{cell}: lacks a row of the null GPU" for cell in on_cpu.keys() - on_gpu.keys()]
    for cell, gpu in on_gpu.items():
        cpu = on_cpu.get(cell)
        ended = gpu["verdict"] == "refused" or (
            not gpu["trace"] and "on rank" not in gpu["message"]
        )
        if not ended:
            problems.append(f"{cell}: {gpu['message']}\n{gpu['trace']}")
            continue
        kept[cell] = {"verdict": "refused"} if gpu["verdict"] == "refused" else {
            "ranks": gpu["ranks"], "values": len(gpu["values"]),
            "collectives": gpu["collectives"], "launches": gpu["launches"]}  # fmt: skip
        if cpu is None:  # the cell that compares a GPU with the CPU
            continue
        if (gpu["verdict"] == "refused") != (cpu["verdict"] == "refused"):
            problems.append(f"{cell}: {gpu['verdict']} here and {cpu['verdict']} on the CPU")
        for what in ("values", "collectives"):
            if gpu[what] != cpu[what]:
                problems.append(f"{cell}: {what} are {_short(gpu[what])} here and {_short(cpu[what])} on the CPU")  # fmt: skip
    return kept, problems


def _changes(cells: Cells, before: Cells) -> list[str]:
    return [
        f"{name}: it is {_short(cell)} and was {_short(before.get(name))}; run with --write to keep it"
        for name, cell in cells.items()
        if cell != before.get(name)
    ]


def _as_text(found: dict[str, Any]) -> str:
    """JSON with a line for each cell."""
    runs = [
        f"  {json.dumps(run)}: {{\n"
        + ",\n".join(f"   {json.dumps(name)}: {json.dumps(cell)}" for name, cell in cells.items())
        + "\n  }"
        for run, cells in found["runs"].items()
    ]
    return f'{{\n "torch": "{found["torch"]}",\n "runs": {{\n' + ",\n".join(runs) + "\n }\n}\n"


def _short(value: Any) -> str:
    return json.dumps(value)[:600]


def _cells(run: str, only: str, where: str) -> Cells:
    """Cells of a run in a process of its own, with what their ranks counted."""
    with tempfile.TemporaryDirectory() as name:
        arguments = ["-m", "tests.null_gpu.proofs", "--run", run, "--only", only]
        arguments += ["--inside", where, name]
        if where == "cuda":
            done = device.run(arguments, devices=WORLD, timeout=WORLD * SECONDS)
        else:
            done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{run} on {where} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        cells: Cells = json.loads(Path(name, "cells").read_text())
        for cell, entry in cells.items():
            paths = [Path(name, f"{cell}.{rank}") for rank in range(entry["ranks"])]
            ranks = [json.loads(path.read_text()) for path in paths if path.exists()]
            entry["values"] = sorted({value for rank in ranks for value in rank.pop("values")})
            entry |= {key: [rank[key] for rank in ranks] for key in ("collectives", "launches")}
    return cells


def _inside(run: str, only: str, where: str, folder: str) -> int:
    """Prove on `where`; each rank leaves what it counted in `folder`, as does this process the verdicts."""
    module: Any = importlib.import_module("forge_parallel.prove.prove")
    values: Any = importlib.import_module("forge_parallel.prove.values")
    values.can_generate = lambda model: False  # a text ends by a number that the device computes
    for name in ("rank_of_cell", "compare_with_cpu"):
        setattr(module, name, _counting(getattr(module, name), where, Path(folder)))
    build, precision = RUNS[run]
    results = module.prove(
        build,
        vocab_size=VOCAB,
        device=where,
        nproc=WORLD,
        precision=precision,
        only=only,
        timeout=SECONDS,
    )
    cells = {
        r.cell: {"ranks": r.world, "verdict": r.verdict, "message": r.message, "trace": r.trace}
        for r in results
    }
    Path(folder, "cells").write_text(json.dumps(cells))
    return 0


def _counting(measure: Callable[..., Any], where: str, folder: Path) -> Callable[..., Any]:
    @functools.wraps(measure)
    def counted(*given: Any) -> Any:
        """In a rank, whose process ends without a goodbye."""
        count = _nccl if where == "cuda" else _gloo
        errors, collectives, launches = count(functools.partial(measure, *given))
        rank = dist.get_rank() if dist.is_initialized() else 0
        cell = getattr(given[1], "name", "GPU beside CPU")  # prose: the name of a case
        values = [f"{step} {what} {name}" for step, what, name in {*errors[0]}]
        found = {"values": values, "collectives": collectives, "launches": launches}
        (folder / f"{cell}.{rank}").write_text(json.dumps(found))
        return errors

    return counted


def _nccl(run: Callable[[], Any]) -> tuple[Any, dict[str, int], dict[str, int]]:
    before = device.counted()
    result = run()
    made = device.counted() - before
    collectives = {kind: made[f"nccl.{kind}"] for kind in sorted({*KINDS.values()}) if made[f"nccl.{kind}"]}  # fmt: skip
    unknown = [kind for kind in ("reduce", "all_to_all") if made[f"nccl.{kind}"]]
    assert not unknown, unknown
    return result, collectives, {kind: made[kind] for kind in LAUNCHES if made[kind]}


def _gloo(run: Callable[[], Any]) -> tuple[Any, dict[str, int], dict[str, int]]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = run()
    assert profile.profiler is not None
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    made = Counter(event.name() for event in events if event.name().startswith("c10d::"))
    collectives: Counter[str] = Counter()
    for call, number in made.items():
        collectives[KINDS[call.removeprefix("c10d::")]] += number
    return result, dict(sorted(collectives.items())), {}


if __name__ == "__main__":
    sys.exit(main())
