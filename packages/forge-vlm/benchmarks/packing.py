"""Useful tokens a second of a training step, packed rows against padded ones, on a mixed set of conversations; and useful
patches of an encoder, packed images of any sizes against padded ones.

    python packages/forge-vlm/benchmarks/packing.py --threads 1
    python packages/forge-vlm/benchmarks/packing.py --threads 1 --only patches

The set of conversations is written to a temporary folder: short captions of a picture, long conversations about one or two, and text alone.
A source reads it twice, packed and one sample a row; the same model then takes the same samples, and computes the mean
loss of their labels and its gradients, in micro-batches of at most `--tokens` places:

    packed     rows of `--seq_len`
    padded     one sample a row of `--seq_len`
    longest    one sample a row, cut to the longest of its micro-batch, in the order of the files
    by_length  the same, of samples sorted by length, which no training does without care for its order

Patches are of pictures whose aspect lies between 1 : 3 and 3 : 1 and whose area between a sixteenth of `--pixels` and all of it,
both even in the logarithm. `PackedViT` takes them, in micro-batches of at most `--patches` places:

    packed     one behind the other, attention in segments
    padded     each picture filled up to the largest of all, under a mask of what is real
    longest    the same, to the largest of its micro-batch
    by_length  the same, of pictures sorted by their number of patches

Losses are compared first. `speedup` is the median, with quartiles, of their time over that of packed rows within a round:
useful tokens (patches) are the same. Reading is left out, and time on a CPU is the process's own. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import harness
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from forge_core import cross_entropy, initialize
from forge_vlm import VLM, ModalityConfig, VisionConfig, VLMConfig
from forge_vlm.data import VisionChatSource
from forge_vlm.resolution import BudgetConfig, ResolutionConfig, build_resolution
from forge_vlm.vision import PackedViT, ViTConfig

IMAGE = 257  # of the byte tokenizer


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--seq_len", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=4096, help="places of a micro-batch")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--image", type=int, default=112, help="side of a picture in pixels")
    parser.add_argument("--only", choices=["conversations", "patches"], default=None)
    parser.add_argument("--pictures", type=int, default=64, help="of the patches")
    parser.add_argument("--pixels", type=int, default=336**2, help="the largest of them")
    parser.add_argument("--patches", type=int, default=2048, help="places of their micro-batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=None)
    return parser.parse_args()


def write_set(folder: Path, args: argparse.Namespace) -> Path:
    """Half captions of 20 to 80 letters, a third conversations of 300 to 700, the rest text of 50 to 500."""
    from PIL import Image

    rng = random.Random(0)
    Image.new("RGB", (args.image, args.image), (90, 120, 30)).save(folder / "a.png")
    picture = {"type": "image", "image": "a.png"}

    def text(low: int, high: int) -> str:
        return "".join(rng.choices("abcdefgh ", k=rng.randint(low, high)))

    records = []
    for _ in range(args.samples):
        kind, talk = rng.random(), list[tuple[Any, Any]]()
        if kind < 0.5:
            talk = [([picture], text(20, 80))]
        elif kind < 0.83:
            first = [picture] * rng.randint(1, 2) + [{"type": "text", "text": text(20, 60)}]
            talk = [(first, text(60, 150)), *((text(10, 60), text(60, 150)) for _ in range(3))]
        else:
            talk = [(text(20, 100), text(30, 400))]
        messages = [
            {"role": role, "content": content}
            for turn in talk
            for role, content in zip(("user", "assistant"), turn, strict=True)
        ]
        records.append(json.dumps({"messages": messages}))
    (folder / "talks.jsonl").write_text("\n".join(records))
    return folder / "talks.jsonl"


class Rows(NamedTuple):
    """tokens, labels, positions and document_ids (B, S), the pictures of all rows and the place of a row's first."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    document_ids: Tensor
    images: Tensor
    offsets: Tensor

    def part(self, rows: Tensor, size: int) -> Rows:
        """Some of the rows, up to a number of places."""
        pictures = [self.images[self.offsets[r] : self.offsets[r + 1]] for r in rows.tolist()]
        counts = torch.tensor([0, *map(len, pictures)])
        return Rows(
            self.tokens[rows, :size],
            self.labels[rows, :size],
            self.positions[rows, :size],
            self.document_ids[rows, :size],
            torch.cat(pictures),
            counts.cumsum(0),
        )


def rows_of(path: Path, args: argparse.Namespace, *, pack: bool) -> Rows:
    source = VisionChatSource(
        path,
        pack=pack,
        tokens_per_tile=(args.image // 14) ** 2,
        resolution={"fixed": {"size": args.image}},
    )
    stream = source.stream(args.seq_len, 0)
    arrays = stream.arrays(np.arange(len(stream)))
    names = ("tokens", "labels", "positions", "document_ids")
    tensors = {name: torch.from_numpy(arrays[name]).to(args.device) for name in names}
    images = arrays["images"]
    return Rows(**tensors, images=images.values.to(args.device), offsets=images.row_offsets)


def micro_batches(rows: Rows, args: argparse.Namespace, name: str) -> list[Rows]:
    """All rows in parts of at most `args.tokens` places."""
    lengths = (rows.document_ids >= 0).sum(1)
    order = lengths.argsort() if name == "by_length" else torch.arange(len(lengths))
    whole = name in ("packed", "padded")

    def parts() -> Iterator[Rows]:
        part: list[int] = []
        size = 0
        for row in order.tolist():
            wanted = args.seq_len if whole else max(size, int(lengths[row]))
            if part and wanted * (len(part) + 1) > args.tokens:
                yield rows.part(torch.tensor(part), size)
                part, wanted = [], args.seq_len if whole else int(lengths[row])
            part.append(row)
            size = wanted
        yield rows.part(torch.tensor(part), size)

    return list(parts())


def trained(model: VLM, batches: list[Rows]) -> float:
    """The mean loss of all labels, whose gradients are made and cleared."""
    model.zero_grad()
    total, count = 0.0, sum(int((b.labels >= 0).sum()) for b in batches)
    for b in batches:
        logits = model(b.tokens, b.positions, b.document_ids, images=b.images)
        loss = cross_entropy(logits, b.labels).sum / count
        loss.backward()
        total += float(loss.detach())
    return total


class Padded(PackedViT):
    """The same encoder with a row for each picture, filled up to `longest` patches."""

    longest = 0

    def encoded(self, x: Tensor, attend: Any) -> Tensor:
        """(1, P, W) -> (1, P, W)."""
        lengths = attend.keywords["plan"].lengths
        rows = pad_sequence(x[0].split(lengths), batch_first=True)
        rows = F.pad(rows, (0, 0, 0, self.longest - rows.size(1)))  # (N, T, W)
        places = torch.arange(self.longest, device=x.device)
        real = places < torch.tensor(lengths, device=x.device)[:, None]  # (N, T)

        def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            seen = F.scaled_dot_product_attention(q, k, v, attn_mask=real[:, None, None])
            return seen.transpose(1, 2)

        return super().encoded(rows, masked)[real][None]


class Part(NamedTuple):
    """A micro-batch: patches (P, E), grids (N, 3), the factor of each patch in the loss, and patches of a row."""

    patches: Tensor
    grids: Tensor
    factors: Tensor
    longest: int


def draw_grids(args: argparse.Namespace) -> list[tuple[int, int]]:
    """Rows and columns of each picture under a budget of its area."""
    rng = random.Random(0)
    found = []
    for _ in range(args.pictures):
        area, aspect = args.pixels * 16 ** -rng.random(), 9 ** (rng.random() - 0.5)
        sides = round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)
        budget = BudgetConfig(multiple=14, min_pixels=14**2, max_pixels=args.pixels)
        layout = build_resolution(ResolutionConfig("budget", budget=budget)).layout(*sides)
        found.append((layout.height // 14, layout.width // 14))
    return found


def patch_parts(args: argparse.Namespace, name: str) -> list[Part]:
    """All pictures in micro-batches of at most `args.patches` places; one picture's patches are those of its number."""
    grids = draw_grids(args)
    lengths = [rows * columns for rows, columns in grids]
    order = sorted(range(len(grids)), key=lengths.__getitem__) if name == "by_length" else range(len(grids))  # fmt: skip
    groups: list[list[int]] = [[]]

    def places(group: list[int]) -> int:
        each = [lengths[n] for n in group]
        if name == "packed":
            return sum(each)
        return len(each) * max(lengths if name == "padded" else each)

    for n in order:
        if groups[-1] and places([*groups[-1], n]) > args.patches:
            groups.append([])
        groups[-1].append(n)
    widest = max(lengths)
    return [
        Part(
            torch.cat([noise(n, lengths[n], 3 * 14 * 14, args) for n in group]),
            torch.tensor([[1, *grids[n]] for n in group]),
            torch.cat([noise(n, lengths[n], 1, args) for n in group]),
            widest if name == "padded" else max(lengths[n] for n in group),
        )
        for group in groups
    ]


def noise(seed: int, rows: int, columns: int, args: argparse.Namespace) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).to(args.device)


def trained_patches(model: PackedViT, parts: list[Part]) -> float:
    """A sum over the features of all patches, whose gradients are made and cleared."""
    model.zero_grad()
    total, count = 0.0, sum(len(part.patches) for part in parts)
    for part in parts:
        if isinstance(model, Padded):
            model.longest = part.longest
        loss = (model(part.patches, part.grids).tokens[0].tanh() * part.factors).sum() / count
        loss.backward()
        total += float(loss.detach())
    return total


def patches_row(args: argparse.Namespace, clock: Callable[[], float]) -> dict[str, Any]:
    vit = ViTConfig(image_size=336, patch_size=14, dim=args.dim, num_layers=args.layers)
    vision = VisionConfig("packed_vit", vit=vit)
    models = {"packed": PackedViT(vision), "other": Padded(vision)}
    for model in models.values():
        initialize(model, 0, std=0.1, residual_std=0.1)
        model.to(args.device)
    parts = {n: patch_parts(args, n) for n in ("packed", "padded", "longest", "by_length")}
    steps: dict[str, Callable[[], Any]] = {
        name: partial(trained_patches, models.get(name, models["other"]), own)
        for name, own in parts.items()
    }
    places = {
        name: sum(len(p.patches) if name == "packed" else len(p.grids) * p.longest for p in own)
        for name, own in parts.items()
    }
    return {"of": "patches", **compared(args, steps, clock, places["packed"], "patches", places)}


def compared(
    args: argparse.Namespace,
    steps: dict[str, Callable[[], Any]],
    clock: Callable[[], float],
    useful: int,
    what: str,
    places: dict[str, int],
) -> dict[str, Any]:
    """Losses of all `steps`, which must agree, and their speed against that of "packed"."""
    losses = {name: step() for name, step in steps.items()}
    assert max(losses.values()) - min(losses.values()) < 1e-4, losses
    seconds = harness.interleave(steps, args.rounds, args.warmup, torch.device(args.device), clock)
    return {
        f"useful_{what}": useful,
        "places": places,
        "losses": losses,
        f"useful_{what}_per_second": {
            n: useful / harness.spread(values)["median"] for n, values in seconds.items()
        },
        "speedup": {
            n: harness.ratios(seconds[n], seconds["packed"]) for n in steps if n != "packed"
        },
    }


def conversations_row(args: argparse.Namespace, clock: Callable[[], float]) -> dict[str, Any]:
    vit = ViTConfig(image_size=args.image, patch_size=14, dim=128, num_layers=2, num_heads=4)
    model = VLM(
        VLMConfig(
            vocab_size=258,
            dim=args.dim,
            num_layers=args.layers,
            num_heads=4,
            max_seq_len=args.seq_len,
            vision=VisionConfig(vit=vit),
            modalities={"image": ModalityConfig(IMAGE)},
        )
    ).to(args.device)
    with tempfile.TemporaryDirectory() as folder:
        path = write_set(Path(folder), args)
        packed, padded = (rows_of(path, args, pack=pack) for pack in (True, False))
    batches = {
        name: micro_batches(packed if name == "packed" else padded, args, name)
        for name in ("packed", "padded", "longest", "by_length")
    }
    steps: dict[str, Callable[[], Any]] = {
        name: partial(trained, model, parts) for name, parts in batches.items()
    }
    useful = int((packed.document_ids >= 0).sum())
    places = {n: sum(b.tokens.numel() for b in parts) for n, parts in batches.items()}
    of = {"of": "conversations", "pictures": len(packed.images)}
    return {**of, **compared(args, steps, clock, useful, "tokens", places)}


def main() -> None:
    args = arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    clock = time.perf_counter if args.device == "cuda" else time.process_time
    measured = {"conversations": conversations_row, "patches": patches_row}
    rows = [row(args, clock) for name, row in measured.items() if args.only in (None, name)]
    harness.emit("vlm packing", torch.device(args.device), settings=vars(args), rows=rows)


if __name__ == "__main__":
    main()
