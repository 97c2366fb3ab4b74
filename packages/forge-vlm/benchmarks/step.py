"""A training step of the joint decoder beside transformers' LLaVA with the same weights: seconds and ratio.

    python packages/forge-vlm/benchmarks/step.py --threads 1

Both read the same pictures and rows, compute the mean cross-entropy of text labels, its gradients, and clear them; that logits
and losses agree is checked first. `loss` of Forge is its own; `forge_fused` never holds all logits. transformers runs as
a user calls it, labels given. Rounds are interleaved; `speedup` is the median with quartiles of their time over ours
within a round. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import harness
import torch
from torch import Tensor

from forge_core import cross_entropy, families, fused_cross_entropy
from forge_vlm import VLM, ModalityConfig, VisionConfig, VLMConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
IMAGE = 3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocab", type=int, default=16000)
    parser.add_argument("--vision_dim", type=int, default=128)
    parser.add_argument("--vision_layers", type=int, default=4)
    parser.add_argument("--image", type=int, default=112, help="side of a picture in pixels")
    parser.add_argument("--text", type=int, default=192, help="tokens of text in a row")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=None)
    return parser.parse_args()


def models(args: argparse.Namespace) -> tuple[VLM, Any]:
    """Forge's and transformers' model with the same weights."""
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": args.vision_dim,
        "intermediate_size": 4 * args.vision_dim,
        "num_hidden_layers": args.vision_layers,
        "num_attention_heads": 4,
        "image_size": args.image,
        "patch_size": 14,
    }
    text = transformers.LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.dim,
        intermediate_size=3 * args.dim,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=IMAGE,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )
    torch.manual_seed(0)
    theirs = transformers.LlavaForConditionalGeneration(config)
    ours = VLM(
        VLMConfig(
            **vars(families.LLAMA.config_from_hf(text.to_dict())),
            vision=VisionConfig(
                "transformers", transformers=vision, select_layer=(-1,), select_feature="patch"
            ),
            modalities={"image": ModalityConfig(IMAGE)},
        )
    )
    names = {}
    for hf, forge, _ in families.LLAMA.rows:
        for layer in range(args.layers if "{i}" in hf else 1):
            name = hf.format(i=layer).replace("model.", "model.language_model.", 1)
            names[name] = forge.format(i=layer)
    weights = {}
    for name, value in theirs.state_dict().items():
        name = name.replace("model.multi_modal_projector.", "adapter.")
        name = name.replace("model.vision_tower.", "vision.model.")
        weights[names.get(name, name)] = value
    ours.load_state_dict(weights)
    dtype = DTYPES[args.dtype]
    return ours.to(args.device, dtype), theirs.to(args.device, dtype)


def batch(args: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens and labels (B, S), shifted, and pictures (B, 3, H, W)."""
    generator = torch.Generator().manual_seed(1)
    places = (args.image // 14) ** 2
    text = torch.randint(4, args.vocab, (args.batch, args.text), generator=generator)
    tokens = torch.cat([torch.full((args.batch, places), IMAGE), text], dim=1)
    labels = torch.full_like(tokens, -100)
    labels[:, places - 1 : -1] = text
    images = torch.randn(args.batch, 3, args.image, args.image, generator=generator)
    return tokens.to(args.device), labels.to(args.device), images.to(args.device)


def steps(args: argparse.Namespace, ours: VLM, theirs: Any) -> dict[str, Callable[[], Tensor]]:
    """Losses with gradients, which each call clears first."""
    tokens, labels, images = batch(args)
    images = images.to(DTYPES[args.dtype])
    given = torch.where(tokens == IMAGE, -100, tokens)  # transformers shifts by itself

    def trained(model: Any, loss: Callable[[], Tensor]) -> Tensor:
        model.zero_grad()
        value = loss()
        value.backward()
        return value.detach()

    def whole() -> Tensor:
        return cross_entropy(ours(tokens, images=images), labels).mean

    def fused() -> Tensor:
        def then(x: Tensor, weight: Tensor) -> Tensor:
            return fused_cross_entropy(x, weight, labels).mean

        return ours(tokens, images=images, loss=then)

    def other() -> Tensor:
        loss: Tensor = theirs(input_ids=tokens, pixel_values=images, labels=given).loss
        return loss

    return {
        "forge": partial(trained, ours, whole),
        "forge_fused": partial(trained, ours, fused),
        "transformers": partial(trained, theirs, other),
    }


def main() -> None:
    args = arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    ours, theirs = models(args)
    run = steps(args, ours, theirs)
    losses = {name: float(step()) for name, step in run.items()}
    seconds = harness.interleave(run, args.rounds, args.warmup, torch.device(args.device))
    names = [name for name in run if name != "transformers"]
    row = {
        "losses": losses,
        "seconds": {name: harness.spread(values) for name, values in seconds.items()},
        "speedup": {n: harness.ratios(seconds["transformers"], seconds[n]) for n in names},
    }
    harness.emit("vlm step", torch.device(args.device), settings=vars(args), rows=[row])


if __name__ == "__main__":
    main()
