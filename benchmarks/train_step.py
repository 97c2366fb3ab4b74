"""A training step of a dense decoder: tokens/s, MFU, peak memory; beside transformers if asked.

    python benchmarks/train_step.py --precision bf16 --against transformers

Both sides do forward, loss, backward, clipping to norm 1 and fused AdamW over fp32 parameters, on
the same random tokens. bf16 is FSDP2's mixed precision here and autocast there. Prints one JSON line.

MFU = tokens/s * flops per token / peak, where flops per token = 3 * (2 * weights of the matrices +
2 * heads * head_dim * seq_len per layer): causal attention at half, no embedding lookup, nothing
for recomputation. The peak is the data sheet's dense bf16 one, or --peak-tflops; null without.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import harness
import torch
from torch import nn

Step = Callable[[], torch.Tensor]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=None)
    parser.add_argument("--hidden-dim", type=int, default=None)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="timed rounds")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--against", choices=["transformers"], default=None)
    parser.add_argument("--compile", action="store_true", help="torch.compile on both sides")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads of torch")
    parser.add_argument("--peak-tflops", type=float, default=None, help="for MFU on other devices")
    return parser.parse_args()


def forge_step(args: argparse.Namespace, tokens: torch.Tensor) -> tuple[Step, Any]:
    """Forge's step, and its model."""
    from forge_core import (
        OptimizerConfig,
        Transformer,
        TransformerConfig,
        build_optimizer,
        cross_entropy,
        initialize,
    )
    from forge_parallel import ParallelConfig, clip_grad_norm_, parallelize

    config = TransformerConfig(
        vocab_size=args.vocab,
        dim=args.dim,
        num_layers=args.layers,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        hidden_dim=args.hidden_dim,
        max_seq_len=max(args.seq, 1),
    )
    with torch.device("meta"):
        model = Transformer(config)
    if args.compile:
        for block in model.blocks():
            block.compile()
    parallelize(model, ParallelConfig(device=tokens.device.type, precision=args.precision))
    initialize(model, seed=0)
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-4))

    def step() -> torch.Tensor:
        loss = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).mean
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, model


def transformers_step(args: argparse.Namespace, tokens: torch.Tensor, hidden_dim: int) -> Step:
    """The step of `LlamaForCausalLM` with the same shapes, its own loss and SDPA attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.dim,
        intermediate_size=hidden_dim,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads or args.heads,
        max_position_embeddings=max(args.seq, 1),
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model: Any = LlamaForCausalLM(config).to(tokens.device).train()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.95), fused=True)
    forward = torch.compile(model) if args.compile else model
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    bf16 = args.precision == "bf16"

    def step() -> torch.Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=bf16):
            loss = forward(input_ids=inputs, labels=labels, shift_labels=labels).loss
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def main() -> None:
    args = arguments()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    from forge_core.flops import flops_per_token, parameter_count, peak_flops
    from forge_parallel import end_process_group, select_device

    device = select_device(args.device)
    torch.manual_seed(0)
    tokens = torch.randint(0, args.vocab, (args.batch, args.seq + 1)).to(device)
    forge, model = forge_step(args, tokens)
    steps: dict[str, Step] = {"forge": forge}
    if args.against is not None:
        hidden_dim = args.hidden_dim or model.config.resolved_hidden_dim
        steps[args.against] = transformers_step(args, tokens, hidden_dim)
    seconds = harness.interleave(steps, args.steps, args.warmup, device)

    peak = peak_flops(device, torch.bfloat16)
    if args.peak_tflops is not None:
        peak = args.peak_tflops * 1e12
    per_token = flops_per_token(model, args.seq)
    results: dict[str, Any] = {}
    for name, step in steps.items():
        rate = args.batch * args.seq / harness.spread(seconds[name])["median"]
        results[name] = {
            "tokens_per_second": rate,
            "mfu": None if peak is None else rate * per_token / peak,
            "seconds": harness.spread(seconds[name]),
            "peak_memory_bytes": harness.peak_memory(step, device),
            "counts": None if args.compile else harness.count(step, device),
        }
    speedup = None
    if args.against is not None:
        speedup = harness.ratios(seconds[args.against], seconds["forge"])
    harness.emit(
        "train_step",
        device,
        settings=vars(args),
        parameters=parameter_count(model),
        flops_per_token=per_token,
        peak_flops=peak,
        results=results,
        speedup=speedup,
    )
    end_process_group()


if __name__ == "__main__":
    main()
