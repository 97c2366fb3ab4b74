"""Greedy decoding beside transformers with its dynamic and its static cache: tokens/s and ratios.

    python packages/forge-core/benchmarks/generate.py --batch 1 8 --dtype fp32

Both sides hold the same weights (those of a random LlamaForCausalLM, by Forge's map of that family), read the
same prompts and write the same number of tokens; that these are the same tokens is checked first. transformers
runs its own `generate` as a user calls it. Rounds are interleaved; `speedup` is the median with quartiles of
the other's time over ours within a round. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import harness
import torch
from torch import Tensor

from forge_core import SamplingConfig, Transformer, families, generate

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Write = Callable[[], Tensor]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens to write")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=None)
    return parser.parse_args()


def models(args: argparse.Namespace) -> tuple[Transformer, Any]:
    """Forge's and transformers' model with the same weights."""
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = transformers.LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.dim,
        intermediate_size=args.dim * 3,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=args.prompt + args.new,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(config)
    ours = Transformer(families.LLAMA.config_from_hf(config.to_dict()))
    names = {}
    for hf, forge, _ in families.LLAMA.rows:
        for layer in range(args.layers if "{i}" in hf else 1):
            names[hf.format(i=layer)] = forge.format(i=layer)
    ours.load_state_dict({names[name]: value for name, value in theirs.state_dict().items()})
    dtype = DTYPES[args.dtype]
    return ours.to(args.device, dtype).eval(), theirs.to(args.device, dtype).eval()


def writers(args: argparse.Namespace, ours: Any, theirs: Any, batch: int) -> dict[str, Write]:
    shape, generator = (batch, args.prompt), torch.Generator().manual_seed(1)
    prompts = torch.randint(1, args.vocab, shape, generator=generator).to(args.device)
    greedy = SamplingConfig(temperature=0.0)

    def other(cache: str) -> Write:
        options = {"max_new_tokens": args.new, "do_sample": False, "use_cache": True}
        mask = torch.ones_like(prompts)
        return lambda: theirs.generate(
            prompts, attention_mask=mask, cache_implementation=cache, **options
        )[:, args.prompt :]

    return {
        "forge": lambda: generate(ours, prompts, args.new, greedy),
        "transformers_dynamic": other("dynamic"),
        "transformers_static": other("static"),
    }


def measure(args: argparse.Namespace, ours: Any, theirs: Any, batch: int) -> dict[str, Any]:
    write = writers(args, ours, theirs, batch)
    tokens = {name: step() for name, step in write.items()}
    wanted = tokens.pop("forge")
    same = {name: float((found == wanted).double().mean()) for name, found in tokens.items()}
    seconds = harness.interleave(write, args.rounds, args.warmup, torch.device(args.device))
    count = batch * args.new
    return {
        "batch": batch,
        "same_tokens": same,
        "tokens_per_second": {
            n: harness.spread([count / s for s in v]) for n, v in seconds.items()
        },
        "speedup": {name: harness.ratios(seconds[name], seconds["forge"]) for name in tokens},
    }


def main() -> None:
    args = arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    ours, theirs = models(args)
    rows = [measure(args, ours, theirs, batch) for batch in args.batch]
    harness.emit("generate", torch.device(args.device), settings=vars(args), rows=rows)


if __name__ == "__main__":
    main()
