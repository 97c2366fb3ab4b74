"""Parts of another author, most of them of a transformer, each with one option."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_core import FeedForward, RMSNorm, Transformer, TransformerConfig
from forge_core.model import Block
from forge_train import Callback


class RunningMean(nn.Module):
    """A mixer that gives each token the mean of its sequence so far."""

    def __init__(self, config: Any, layer: int, gain: float = 1.0) -> None:
        super().__init__()
        self.proj = nn.Linear(config.dim, config.dim, bias=False)
        self.gain = gain

    def forward(self, x: Tensor, ctx: Any = None, cache: Any = None) -> Tensor:
        count = torch.arange(1, x.size(1) + 1, device=x.device)[:, None]
        mean: Tensor = self.proj(x).cumsum(1) / count * self.gain  # (B, S, D)
        return mean

    def flops_per_token(self, seq_len: int) -> float:
        return 2.0 * self.proj.weight.numel()


class Buffered(RunningMean):
    """The same with a buffer that nothing describes, so that it cannot begin on the meta device."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__(config, layer)
        self.register_buffer("decay", torch.ones(3))


class FeedForwardWithoutFlops(nn.Linear):
    """A feed-forward without `flops_per_token`."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__(config.dim, config.dim)

    def forward(self, x: Tensor, ctx: Any = None) -> Tensor:
        return super().forward(x)


class GainNorm(RMSNorm):
    def __init__(self, dim: int, eps: float, gain: float = 1.0) -> None:
        super().__init__(dim, eps)
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


class PowerOfReLU(FeedForward):
    def __init__(self, config: Any, layer: int, *, power: int) -> None:
        super().__init__(config.dim, config.resolved_hidden_dim, gated=False)
        self.power = power

    def forward(self, x: Tensor, ctx: Any = None) -> Tensor:
        down: Tensor = self.down_proj(F.relu(self.up_proj(x)) ** self.power)
        return down


class ParallelBlock(Block):
    """Both sublayers read the same stream (GPT-J)."""

    def __init__(
        self, config: Any, mixer: nn.Module, feed_forward: nn.Module, weight: float = 1.0
    ) -> None:
        super().__init__(config, mixer, feed_forward)
        self.weight = weight

    def forward(self, x: Tensor, ctx: Any, cache: Any = None) -> Tensor:
        mixed = self.mixer(self.mixer_norm(x), ctx, cache)
        return x + self.weight * (mixed + self.feed_forward(self.feed_forward_norm(x), ctx))


def self_only(ctx: Any, queries: Tensor, keys: Tensor) -> Tensor:
    """A mask under which each token attends only to itself."""
    return (queries[:, None] == keys)[None]


def scaled_frequencies(frequencies: Tensor, scaling: Any, by: float = 2.0) -> Tensor:
    """All rotary frequencies divided by a number."""
    return frequencies / by


def half_way(config: Any, total_steps: int, *, height: float) -> Callable[[int], float]:
    """A schedule that is multiplied by `height` half way."""
    return lambda step: height if 2 * step > total_steps else 1.0


def squared_error(
    logits: Tensor, labels: Tensor, weights: Tensor | None, *, scale: float = 1.0
) -> Tensor:
    """Sum over labels of the squared distance of probabilities (Brier), `scale` times."""
    valid = labels != -100
    target = F.one_hot(labels.where(valid, 0), logits.size(-1))
    errors = (logits.float().softmax(-1) - target).square().sum(-1)  # (B, S)
    return scale * (errors * (valid if weights is None else valid * weights)).sum()


def smoothed(model: nn.Module, batch: Any, *, smoothing: float = 0.5) -> dict[str, Tensor]:
    """Sum of token losses against labels that are not quite certain."""
    logits = model(batch.tokens, positions=batch.positions, document_ids=batch.document_ids)
    flat, labels = logits.float().flatten(0, 1), batch.labels.flatten()
    return {"loss": F.cross_entropy(flat, labels, reduction="sum", label_smoothing=smoothing)}


class PatchTransformer(Transformer):
    """Add projected patches of a sequence to its first tokens."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.patch: Any = nn.Linear(4, config.dim, bias=False)

    @property
    def extra_inputs(self) -> tuple[str, ...]:
        """A stage without the embedding takes none."""
        return () if self.patch is None else ("patches", "after_embedding")

    def forward(  # type: ignore[override]
        self,
        tokens: Tensor,
        positions: Tensor,
        document_ids: Tensor,
        patches: Any = None,
        after_embedding: Any = None,
    ) -> Tensor:
        x = tokens
        if self.patch is not None:
            x = self.embedding(tokens)  # (B, S, D)
            found = torch.zeros_like(x)
            for row, (first, last) in enumerate(zip(patches.row_offsets, patches.row_offsets[1:])):
                found[row, : last - first] = self.patch(patches.values[first:last])
            x = x + found + 0.0 * self.patch.weight.sum()
            x = after_embedding(x) if after_embedding is not None else x
            x = self.add_positions(x, positions)
        text = positions if positions.dim() == 2 else positions[:, 0].contiguous()  # (B, S)
        return super().forward(x, text, document_ids)

    def add_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        """What further axes of position add to the stream (B, S, D)."""
        return x

    def pipeline_parts(self) -> dict[str, Any]:
        return {**super().pipeline_parts(), "first": ("embedding", "patch")}


class LineSink:
    """A sink of rows in a file of their own, which begins each attempt with the step that it goes on from."""

    def __init__(self, directory: Path, resume_step: int, *, file: str = "rows.txt") -> None:
        self.file = (directory / file).open("a")
        self.write({"resume_step": resume_step})

    def write(self, row: Any) -> None:
        self.file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        self.file.close()


class StepLog(Callback):
    """Writes what it sees, a line a hook, from rank 0."""

    every_steps = 2

    def __init__(self, *, file: str = "steps.txt") -> None:
        self.file, self.seen = file, 0

    def _write(self, trainer: Any, *words: Any) -> None:
        if trainer.meshes.rank == 0:
            with (trainer.paths.path / self.file).open("a") as file:
                file.write(" ".join(map(str, words)) + "\n")

    def on_step_end(self, trainer: Any) -> None:
        self.seen += 1
        self._write(trainer, "step", trainer.progress.step, self.seen)

    def on_evaluation(self, trainer: Any, name: str, result: float) -> None:
        self._write(trainer, "evaluation", trainer.progress.step, name, result)

    def on_checkpoint(self, trainer: Any, step: int, path: Path) -> None:
        self._write(trainer, "checkpoint", step, path.name, (path / "manifest.json").exists())

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]
