"""Which frames of a clip are looked at: functions of the times at which frames are shown, and of scores.

F   frames of a clip        C   candidates
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from forge_vlm._config import is_finite, is_size
from forge_vlm._shared.problems import Problem, invalid, raise_problems

__all__ = ["Score", "VideoConfig", "at_rate", "best", "score_of", "spread"]

SAMPLING = ("uniform", "first_last", "top_k")
#: Thumbnails (C, 64, 64, 3) uint8 of candidates to a number for each.
Score = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class VideoConfig:
    """Frames of a clip: `VideoConfig("first_last", fps=1.0, max_frames=32)`.

    Candidates are the frames that are shown at `fps` points a second. Where these are more than `max_frames`, "uniform" takes the middles
    of as many equal parts, "first_last" as many at equal distances from the first frame of the clip to its last, and "top_k"
    those with the highest score, in the order of time.
    """

    sampling: Literal["uniform", "first_last", "top_k"] = "uniform"
    """which candidates are taken: uniform, first_last, top_k"""
    fps: float = 2.0
    """candidates of a second"""
    max_frames: int = 16
    """frames of a clip, at most"""
    score: str = "difference"
    """of top_k: difference (to the candidate before), or module:attr"""
    timestamps: bool = True
    """a text as <3.0 seconds> stands before each frame"""

    def __post_init__(self) -> None:
        raise_problems("video", _problems(self))


def _problems(c: VideoConfig) -> Iterator[Problem]:
    if c.sampling not in SAMPLING:
        rule = f"must be {', '.join(SAMPLING)}"
        yield Problem("sampling", "unknown", c.sampling, rule, "use 'uniform'")
    if not is_finite(c.fps) or not 0 < c.fps <= 1000:
        yield Problem("fps", "range", c.fps, "must be a number above 0, at most 1000", "use 2.0")
    if not is_size(c.max_frames, 2**14):
        rule = f"must be a whole number from 1 to {2**14}"
        yield Problem("max_frames", "size", c.max_frames, rule, "use 16")
    elif c.sampling == "first_last" and c.max_frames < 2:
        rule = "must be 2 or more with sampling 'first_last'"
        yield Problem("max_frames", "ends", c.max_frames, rule, "use 2")
    if c.sampling != "top_k" and c.score != "difference":
        rule = f"is a key of sampling 'top_k', and sampling is {c.sampling!r}"
        yield Problem("score", "foreign", c.score, rule, "remove it")
    elif c.score != "difference" and ":" not in c.score:
        rule = "must be 'difference' or module:attr"
        yield Problem("score", "unknown", c.score, rule, "use 'difference'")


def at_rate(times: np.ndarray, fps: float) -> np.ndarray:
    """Numbers (C,) of the frames that are shown at times[0] + k / fps, up to the last, each once; times (F,) ascend."""
    points = times[0] + np.arange(int((times[-1] - times[0]) * fps + 1e-6) + 1) / fps
    return np.unique(np.searchsorted(times, points + 1e-6, side="right") - 1)


def spread(count: int, most: int, *, ends: bool = False) -> np.ndarray:
    """Up to `most` of `count` places: the middles of equal parts, or from the first to the last at equal distances."""
    if count <= most:
        return np.arange(count)
    if ends:
        return np.rint(np.arange(most) * (count - 1) / (most - 1)).astype(np.int64)
    return (np.arange(most) * 2 + 1) * count // (2 * most)


def best(scores: np.ndarray, most: int) -> np.ndarray:
    """Places of the highest `most` of scores (C,), ascending; of equal ones the first."""
    return np.sort(np.argsort(-scores, kind="stable")[:most])


def score_of(name: str) -> Score:
    """The function of a name; ValueError for an import path that leads nowhere."""
    if name == "difference":
        return _difference
    module, _, attribute = name.partition(":")
    try:
        found: Score = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        rule = f"cannot be imported ({error})"
        raise invalid("video.score", "import", name, rule, "correct the path") from error
    return found


def _difference(thumbnails: np.ndarray) -> np.ndarray:
    """Mean absolute difference to the candidate before; the first has no such, and is taken."""
    moved = np.abs(np.diff(thumbnails.astype(np.float32), axis=0)).mean((1, 2, 3))
    return np.append(np.inf, moved)
