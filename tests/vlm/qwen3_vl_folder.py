"""A tiny Qwen3-VL as transformers saves it, with random weights, tokenizer, chat template and processor; and conversations
about coloured pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from examples.tiny_models import IDS, write_qwen3_vl

__all__ = ["COLOURS", "IDS", "save", "write_talks"]
COLOURS = {"red": (230, 30, 30), "green": (30, 200, 30), "blue": (40, 60, 240)}


def save(folder: Path, patch: int = 4) -> Any:
    """The model of transformers, and its files at `folder`; tokens of pictures are 2 * 2 patches."""
    pytest.importorskip("transformers")
    pytest.importorskip("tokenizers")
    return write_qwen3_vl(folder, patch)


def write_talks(
    path: Path, count: int = 12, answer: bool = True, caps: tuple[int, int] = (64, 192)
) -> Path:
    """Conversations of one or two pictures of a colour; those of every third have bounds of their own."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for i in range(count):
        name, colour = [*COLOURS.items()][i % len(COLOURS)]
        parts: list[dict[str, Any]] = []
        for j in range(1 + i % 2):
            Image.new("RGB", (16 + 8 * (i % 3), 24), colour).save(path.parent / f"{i}-{j}.png")
            parts.append({"type": "image", "image": f"{i}-{j}.png"})
            if i % 3 == 0:
                parts[-1] |= dict(zip(("min_pixels", "max_pixels"), caps))
        said: list[Any] = [
            {"role": "user", "content": [*parts, {"type": "text", "text": "colour?"}]}
        ]
        if answer:
            said.append({"role": "assistant", "content": name})
        lines.append(json.dumps({"messages": said}))
    path.write_text("\n".join(lines) + "\n")
    return path
