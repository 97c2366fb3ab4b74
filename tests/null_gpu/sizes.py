"""One step of models at their real sizes on the null GPU: kernels, bytes, FLOPs, waits, gathered bytes and peak memory.

    hatch run null-gpu sizes                        # all; compared with docs/data/null-gpu-sizes.json
    hatch run null-gpu sizes --only 'dense*'        # some; may be repeated; 'places' are those of the second table
    hatch run null-gpu sizes --write                # the table and its page
    hatch run null-gpu sizes --peer torchtitan=/src/torchtitan --only '*torchtitan'

One process is a rank of torch's fake group, which sends nothing. Kernels, waits, gathered bytes and the peak are those of a plain step; bytes
and FLOPs of a second one, as counting adds operators of its own. The device returns zeros, so a router would send every token
to one expert: routes are given from outside, round robin or those of a recorded trace with hot experts, and a job
without them is refused. Red where a count rises, or FLOPs of matmuls differ from the analytic count by more than 1 %.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from functools import partial
from textwrap import dedent
from typing import Any

from tests.null_gpu import device
from tests.null_gpu.steps import ROOT, Absent, Case, torchtitan_step, transformers_step

from forge_testing.commits import short_commit

TABLE, PAGE = ROOT / "docs/data/null-gpu-sizes.json", ROOT / "docs/null-gpu-sizes.md"
SOURCES = ("packages", "apps/train/src", "tests/null_gpu")
#: May only fall; the peak may be 2 % above that of `PEAKS`.
BOUNDED = (
    "kernels",
    "waits",
    "bytes",
    "gathered_bytes",
    "largest_unit",
    "most_unit_bytes",
    "peak",
    "largest_tensor",
)
#: Bytes at the peak of the same step at commit 0262d1bc, before the kernels for GPUs.
PEAKS: dict[str, int] = {}

_TWO = {"model.num_layers": 2}
_EP = {"parallel.ep": 8}
_SELECTIVE = {"parallel.recompute": "selective"}
_GEMMA = {
    "model.dim": 2560, "model.num_heads": 8, "model.num_kv_heads": 4, "model.hidden_dim": 10240, "model.num_layers": 2,
    "model.norm": "rms_norm_plus_one", "model.block": "sandwich", "model.qk_norm": True, "model.head_dim": 256,
}  # fmt: skip
_7B, _1B, _MOE_8, _MOE_64, _VLM = (
    f"configs/recipes/{name}.toml" for name in ("7b", "1b", "moe_8", "moe_64", "qwen3_siglip2")
)
_CP = {"parallel.cp": 2, "parallel.dp_shard": 1, "train.global_batch": 1, **_TWO}
_EVEN = "round robin"
CASES = {
    "dense 8B": Case(_7B),
    "dense 8B, 8 documents": Case(_7B, documents=8),
    "dense 8B, bf16 moments": Case(_7B, flags={"optimizer.state_dtype": "bf16"}),
    "dense 8B, fused loss, 2 layers": Case(_7B, seq_len=8192, flags={"train.loss": "fused_cross_entropy", **_TWO}),
    "windows, 2 layers": Case(_7B, seq_len=8192, flags={"model.attention.window": 4096, **_TWO}),
    "gemma norms, 2 layers": Case(_7B, flags=_GEMMA),
    "moe 8": Case(_MOE_8, routes=_EVEN),
    "moe 8, EP 8": Case(_MOE_8, routes=_EVEN, flags=_EP),
    "moe 8, EP 8, 2 layers": Case(_MOE_8, routes=_EVEN, flags={**_EP, **_TWO}),
    "moe 8, EP 8, 2 layers, selective": Case(_MOE_8, routes=_EVEN, flags={**_EP, **_TWO, **_SELECTIVE}),
    "moe 64, EP 8": Case(_MOE_64, routes=_EVEN, flags=_EP),
    "moe 64, EP 8, 2 layers": Case(_MOE_64, routes=_EVEN, flags={**_EP, **_TWO}),
    "moe 64, EP 8, hot experts": Case(_MOE_64, rank=1, routes="hot experts", flags=_EP),
    "vlm, 8 images": Case(_VLM, images=8),
    "1b, CP 2": Case(_1B, ranks=2, flags=_CP),
    "1b, CP 2, selective": Case(_1B, ranks=2, flags={**_CP, **_SELECTIVE}),
    "dense 8B of transformers": Case(peer="transformers", make=partial(
        transformers_step, kind="Llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8)),
    "moe 8 of transformers": Case(routes=_EVEN, peer="transformers", make=partial(
        transformers_step, kind="Mixtral", hidden_size=2048, intermediate_size=7168, num_hidden_layers=24,
        num_attention_heads=16, num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2)),
    "dense 8B of torchtitan": Case(peer="torchtitan", make=torchtitan_step),
}  # fmt: skip


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="hatch run null-gpu sizes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--only", action="append", metavar="PATTERN", help="of names; may be repeated")  # fmt: skip
    parser.add_argument("--write", action="store_true", help="keep what was counted, and write the page")  # fmt: skip
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PATH", help="sources of a peer")  # fmt: skip
    args = parser.parse_args(argv)
    peers = [peer.partition("=")[2] for peer in args.peer]
    kept: dict[str, Any] = {"steps": {}, "places": {}}
    if TABLE.exists():
        kept = json.loads(TABLE.read_text())
    reds = 0
    for name in (*CASES, "places"):
        if not any(fnmatch(name, pattern) for pattern in args.only or ["*"]):
            continue
        words = ["sizes", name, *peers] if name in CASES else ["compared_places"]
        done = device.run(["-m", f"tests.null_gpu.{words[0]}", *words[1:]], cwd=ROOT, timeout=1800, memory_gib=1000, skip_copies_above=2**20)  # fmt: skip
        if done.returncode:
            print(f"{name}: RED\n{done.stderr[-3000:]}", flush=True)
            reds += 1
            continue
        row = json.loads(done.stdout.splitlines()[-1])
        if "absent" in row:
            print(f"{name}: absent: {row['absent']}", flush=True)
            continue
        wrong = list(problems(name, row, {} if args.write else kept["steps"].get(name, {})))
        if name == "places":
            wrong = [] if args.write else list(more_in_places(row, kept["places"]))
        reds += bool(wrong)
        print(f"{name}: {'RED' if wrong else 'ok'}\n    {row}", *wrong, sep="\n    ", flush=True)
        if name == "places":
            kept["places"] = row
        else:
            kept["steps"][name] = row | {"commit": short_commit(ROOT, SOURCES)}
    if args.write:
        kept["steps"] = {name: kept["steps"][name] for name in CASES if name in kept["steps"]}
        TABLE.write_text(json.dumps(kept, indent=1) + "\n")
        PAGE.write_text(page(kept))
    return int(bool(reds))


def problems(name: str, row: Mapping[str, Any], kept: Mapping[str, Any]) -> Iterator[str]:
    """What is worse than it was; and FLOPs that are not the analytic ones."""
    if "matmul_flops" not in row:
        return
    for key in BOUNDED:
        if key in kept and row[key] > kept[key] * (1.02 if key == "peak" else 1):
            yield f"{key}: {row[key]:,}, and {kept[key]:,} before"
    if name in PEAKS and row["peak"] > 1.02 * PEAKS[name]:
        yield f"peak: {row['peak']:,}, more than 2 % above {PEAKS[name]:,}"
    if not 0.99 < row["matmul_flops"] / row["analytic_flops"] < 1.01:
        yield f"matmul FLOPs: {row['matmul_flops']:,}, and {row['analytic_flops']:,} by the parameters"


def more_in_places(rows: Mapping[str, Any], kept: Mapping[str, Any]) -> Iterator[str]:
    """Counts of places that rose; the peak by more than 2 %."""
    for place, row in rows.items():
        for key, value in row.items():
            before = kept.get(place, {}).get(key)
            if before is not None and value > before * (1.02 if key == "peak" else 1):
                yield f"{place}, {key}: {value:,}, and {before:,} before"


def page(kept: Mapping[str, Any]) -> str:
    """Markdown of both tables."""
    from tests.null_gpu.compared_places import lines

    rows, places = kept["steps"], kept["places"]
    commits = sorted({row["commit"] for row in rows.values()})
    usage = re.sub(r"(?m)(?:^ {4}.*\n)+", lambda m: f"```bash\n{dedent(m[0])}```\n", __doc__ or "")
    found = f"# Steps at real sizes\n\n{usage}\nWritten by `hatch run null-gpu sizes --write`, commit {', '.join(commits)}.\n\n"
    found += "| one step of a rank | kernels | matmuls | GB moved | TFLOP of matmuls | waits | units: GB gathered, largest, alive | peak GB, at 0262d1bc | largest tensor |\n"
    found += "|---|---:|---:|---:|---:|---:|---|---:|---|\n"
    for name, r in rows.items():
        gib = {k: f"{r[k] / 1e9:,.2f}" for k in ("bytes", "gathered_bytes", "largest_unit", "most_unit_bytes", "peak", "largest_tensor")}  # fmt: skip
        before = f", {PEAKS[name] / 1e9:,.2f}" if name in PEAKS else ""
        found += (
            f"| {name} | {r['kernels']:,} | {r['matmuls']:,} | {gib['bytes']} | {r['matmul_flops'] / 1e12:,.2f} | {r['waits']} | "
            f"{gib['gathered_bytes']}, {gib['largest_unit']}, {gib['most_unit_bytes']} | {gib['peak']}{before} | {gib['largest_tensor']} GB, {r['largest_operator']} |\n"
        )
    found += "\n## The places that were slow\n\nCounts of 2026-11-27, of the last run, and the bounds set between them.\n\n"
    return found + "\n".join(lines(rows, places)) + "\n"


def measure(name: str) -> dict[str, Any]:
    """In a process on the null GPU: the counts of a case."""
    import null_gpu_waits  # type: ignore[import-not-found]

    waits: list[None] = []
    null_gpu_waits.on_wait(lambda: waits.append(None))  # before the device is used
    import torch
    import torch.distributed as dist
    from tests.null_gpu.tally import Tally, Units, launched
    from torch.testing._internal.distributed.fake_pg import FakeStore

    case = CASES[name]
    dist.init_process_group("fake", rank=case.rank, world_size=case.ranks, store=FakeStore())
    model, step, flops = case.make(case)
    for _ in range(2):  # state of the optimizer, buffers of FSDP, which then knows its dtypes
        step()
    units = Units(model)
    torch.cuda.reset_peak_memory_stats()
    waits.clear()
    before = device.counted()
    with units.watched():
        step()
    plain = device.counted()
    plain.subtract(before)
    found = {
        "kernels": launched(plain),
        "waits": len(waits),
        "peak": torch.cuda.max_memory_allocated(),
    }
    with Tally() as tally:
        step()
    calls = {kind: sum(n for name, n in tally.calls.items() if part in name and "backward" not in name) for kind, part in _CALLS.items()}  # fmt: skip
    return found | calls | {
        "matmuls": tally.matmuls,
        "matmul_flops": tally.matmul_flops,
        "analytic_flops": flops,
        "bytes": tally.bytes(),
        "kernels_by_class": dict(tally.kernels.most_common()),
        "bytes_by_class": {kind: [tally.read[kind], tally.written[kind]] for kind, _ in tally.kernels.most_common()},
        "gathered_bytes": units.gathered_bytes(),
        "root_unit": units.bytes.get("root", 0),
        "largest_unit": max(units.bytes.values()),
        "units": len(units.bytes),
        "most_units": units.most_units,
        "most_unit_bytes": units.most_bytes,
        "largest_tensor": tally.largest[0],
        "largest_operator": f"{tally.largest[1]} {tally.largest[2]}",
    }  # fmt: skip


#: Calls of operators, by a part of their names.
_CALLS = {"flash": "flash_attention", "exchanges": "alltoall"}


if __name__ == "__main__":
    sys.path[:0] = sys.argv[2:]
    try:
        row = measure(sys.argv[1])
    except Absent as absent:
        row = {"absent": str(absent)}
    print(json.dumps(row), flush=True)
    os._exit(0)  # not through the ends of threads of the fake group
