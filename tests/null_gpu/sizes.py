"""One step of models at their real sizes on the null GPU: kernels, bytes, FLOPs, waits, gathered bytes and peak memory.

    hatch run null-gpu sizes                        # all; compared with docs/data/null-gpu-sizes.json
    hatch run null-gpu sizes --only 'dense*'        # some; may be repeated
    hatch run null-gpu sizes --write                # the table and its page

One process is rank 0 of the ranks of torch's fake group, which sends nothing. Kernels, waits, gathered bytes and the peak are those of a plain step; bytes
and FLOPs of a second one, as counting adds operators of its own. The device returns zeros, so a router would send every token
to one expert: routes are those of the `uniform` router, and a job with another one is refused. Red where a
count rises, or FLOPs of products differ from the analytic count by more than 1 %.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from tests.null_gpu import device

from forge_testing.commits import short_commit

ROOT = Path(__file__).parents[2]
TABLE, PAGE = ROOT / "docs/data/null-gpu-sizes.json", ROOT / "docs/null-gpu-sizes.md"
SOURCES = ("packages", "apps/train/src", "tests/null_gpu")
#: May only fall.
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


class Case(NamedTuple):
    """A job on `ranks` ranks, in sequences of `seq_len` tokens with so many documents each; `make` makes its step."""

    config: str
    ranks: int = 8
    seq_len: int = 4096
    documents: int = 1
    flags: Mapping[str, Any] = {}
    make: Callable[[Any], Any] = lambda case: forge_step(case)


_MOE = {"model.moe.router": "uniform", "model.moe.bias_update_rate": 0.0, "model.num_layers": 2}
_GEMMA = {
    "model.dim": 2560, "model.num_heads": 8, "model.num_kv_heads": 4, "model.hidden_dim": 10240, "model.num_layers": 2,
    "model.norm": "rms_norm_plus_one", "model.block": "sandwich", "model.qk_norm": True, "model.head_dim": 256,
}  # fmt: skip
CASES = {
    "dense 8B": Case("configs/recipes/7b.toml"),
    "dense 8B, 8 documents": Case("configs/recipes/7b.toml", documents=8),
    "dense 8B, bf16 moments": Case("configs/recipes/7b.toml", flags={"optimizer.state_dtype": "bf16"}),
    "dense 8B, fused loss, 2 layers": Case("configs/recipes/7b.toml", seq_len=8192, flags={"train.loss": "fused_cross_entropy", "model.num_layers": 2}),
    "windows, 2 layers": Case("configs/recipes/7b.toml", seq_len=8192, flags={"model.attention.window": 4096, "model.num_layers": 2}),
    "gemma norms, 2 layers": Case("configs/recipes/7b.toml", flags=_GEMMA),
    "moe 8, 2 layers": Case("configs/recipes/moe_8.toml", flags=_MOE),
    "moe 64, 2 layers": Case("configs/recipes/moe_64.toml", flags=_MOE),
    "dense 8B of transformers": Case("", make=lambda case: transformers_step(case)),
}  # fmt: skip


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="hatch run null-gpu sizes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--only", action="append", metavar="PATTERN", help="of names; may be repeated")  # fmt: skip
    parser.add_argument("--write", action="store_true", help="keep what was counted, and write the page")  # fmt: skip
    args = parser.parse_args(argv)
    kept = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    reds = 0
    for name in CASES:
        if not any(fnmatch(name, pattern) for pattern in args.only or ["*"]):
            continue
        done = device.run(["-m", "tests.null_gpu.sizes", name], cwd=ROOT, memory_gib=1000, skip_copies_above=2**20)  # fmt: skip
        if done.returncode:
            print(f"{name}: RED\n{done.stderr[-3000:]}", flush=True)
            reds += 1
            continue
        row = json.loads(done.stdout.splitlines()[-1])
        wrong = list(problems(row, {} if args.write else kept.get(name, {})))
        reds += bool(wrong)
        print(f"{name}: {'RED' if wrong else 'ok'}\n    {row}", *wrong, sep="\n    ", flush=True)
        kept[name] = row | {"commit": short_commit(ROOT, SOURCES)}
    if args.write:
        TABLE.write_text(json.dumps(kept, indent=1) + "\n")
        PAGE.write_text(page(kept))
    return int(bool(reds))


def problems(row: Mapping[str, Any], kept: Mapping[str, Any]) -> Iterator[str]:
    """What is worse than it was; and FLOPs that are not the analytic ones."""
    for key in BOUNDED:
        if key in kept and row[key] > kept[key] * (1.02 if key == "peak" else 1):
            yield f"{key}: {row[key]:,}, and {kept[key]:,} before"
    if not 0.99 < row["matmul_flops"] / row["analytic_flops"] < 1.01:
        yield f"matmul FLOPs: {row['matmul_flops']:,}, and {row['analytic_flops']:,} by the parameters"


def page(rows: Mapping[str, Mapping[str, Any]]) -> str:
    commits = sorted({row["commit"] for row in rows.values()})
    found = f"# Steps at real sizes\n\n{__doc__}\nWritten by `hatch run null-gpu sizes --write`, commit {', '.join(commits)}.\n\n"
    found += "| one step of rank 0 | kernels | matmuls | GB moved | TFLOP of products | waits | units: GB gathered, largest, alive | peak GB | largest tensor |\n"
    found += "|---|---:|---:|---:|---:|---:|---|---:|---|\n"
    for name, r in rows.items():
        gib = {k: f"{r[k] / 1e9:,.2f}" for k in ("bytes", "gathered_bytes", "largest_unit", "most_unit_bytes", "peak", "largest_tensor")}  # fmt: skip
        found += (
            f"| {name} | {r['kernels']:,} | {r['matmuls']:,} | {gib['bytes']} | {r['matmul_flops'] / 1e12:,.2f} | {r['waits']} | "
            f"{gib['gathered_bytes']}, {gib['largest_unit']}, {gib['most_unit_bytes']} | {gib['peak']} | {gib['largest_tensor']} GB, {r['largest_operator']} |\n"
        )
    return found


class Step(NamedTuple):
    """A sharded model, one step of it, and how many parameters of its matrices a token uses."""

    model: Any
    run: Callable[[], None]
    used: int


def forge_step(case: Case) -> Step:
    """The step of the runner: `Compute`, norm, clipping and the optimizer."""
    import torch

    from forge_core import build_optimizer
    from forge_data import Batch
    from forge_parallel import clip_grads_, global_grad_norm, make_meshes
    from forge_resilience import Agreement
    from forge_train import load_job
    from forge_train.build.build import build_trained
    from forge_train.loop.assemble import job_compute, shard

    flags = {
        "train.steps": 2, "train.tokens": None, "schedule.warmup_steps": 1, "train.global_batch": case.ranks,
        "data.seq_len": case.seq_len, "parallel.device": "cuda", "parallel.precision": "bf16", "parallel.dp_shard": case.ranks,
        **case.flags,
    }  # fmt: skip
    config = load_job(str(ROOT / case.config), flags, with_data=False).config
    moe = config.model.moe
    if moe.num_experts and moe.router != "uniform":
        rule = f"router is {moe.router!r}, whose routes would be those of zeros; use 'uniform'"
        raise ValueError(rule)
    meshes = make_meshes(config.parallel)
    model = shard(build_trained(config), config, meshes, Agreement())
    optimizer = build_optimizer(model, config.optimizer)
    compute = job_compute(model, config, meshes)

    positions = torch.arange(case.seq_len).expand(1, -1)
    length = case.seq_len // case.documents
    tokens = torch.zeros_like(positions)
    batch = Batch(tokens, tokens, (positions % length).contiguous(), (positions // length).contiguous(), torch.zeros(1, dtype=torch.int64), "0" * 16)  # fmt: skip

    def run() -> None:
        sums = compute.gradients(batch, lambda: 1.0)
        norm, _ = global_grad_norm(compute.counted, sums=sums)
        clip_grads_(compute.counted, norm, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    used = numbers_of_matrices(model)
    if moe.num_experts:
        experts = sum(p.numel() for p in model.parameters() if p.ndim == 3)
        used -= experts - experts * moe.top_k // moe.num_experts
    return Step(model, run, used)


def transformers_step(case: Case) -> Step:
    """LlamaForCausalLM of the same sizes with its own loss; FSDP2 by hand: embedding, blocks, norm and head."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192, attn_implementation="sdpa", use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).train()
    options: Any = {
        "mesh": init_device_mesh("cuda", (case.ranks,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    for module in (model.model.embed_tokens, *model.model.layers):
        fully_shard(module, **options)
    fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False, **options)
    fully_shard(model, **options)
    model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(1, case.seq_len, dtype=torch.int64, device="cuda")

    def run() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Step(model, run, numbers_of_matrices(model))


def numbers_of_matrices(model: Any) -> int:
    """Parameters in matrices, without the embedding, which is looked up."""
    named = ((n, p) for n, p in model.named_parameters() if "embed" not in n)
    return sum(p.numel() for _, p in named if p.ndim > 1)


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
    dist.init_process_group("fake", rank=0, world_size=case.ranks, store=FakeStore())
    model, step, used = case.make(case)
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
    return found | {
        "matmuls": tally.matmuls,
        "matmul_flops": tally.matmul_flops,
        "analytic_flops": 6 * used * case.seq_len,
        "bytes": tally.bytes(),
        "kernels_by_class": dict(tally.kernels.most_common()),
        "gathered_bytes": units.gathered_bytes(),
        "root_unit": units.bytes.get("root", 0),
        "largest_unit": max(units.bytes.values()),
        "most_unit_bytes": units.most_bytes,
        "largest_tensor": tally.largest[0],
        "largest_operator": f"{tally.largest[1]} {tally.largest[2]}",
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])), flush=True)
    os._exit(0)  # not through the ends of threads of the fake group
