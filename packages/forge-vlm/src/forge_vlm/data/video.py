"""Video clips as frames among the text of a record; PyAV reads them (`forge-vlm[video]`).

F   frames of a clip        C   candidates        H, W   pixels of a frame
"""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from forge_vlm._config import is_finite, is_size
from forge_vlm._shared.paths import open_regular
from forge_vlm._shared.problems import Problem, ProblemError, raise_problems
from forge_vlm.data.files import InvalidSample, invalid
from forge_vlm.data.records import EncodedImage, Message, Record, Span, Video, unreadable

__all__ = [
    "Clip",
    "Frame",
    "Score",
    "VideoConfig",
    "at_rate",
    "best",
    "expanded",
    "score_of",
    "spread",
]

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
    wanted = times[0] + np.arange(int((times[-1] - times[0]) * fps + 1e-6) + 1) / fps
    return np.unique(np.searchsorted(times, wanted + 1e-6, side="right") - 1)


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
        fix = "correct the path"
        raise invalid("video.score", "import", name, rule, fix, kind=ProblemError) from error
    return found


def _difference(thumbnails: np.ndarray) -> np.ndarray:
    """Mean absolute difference to the candidate before; the first has no such, and is taken."""
    moved = np.abs(np.diff(thumbnails.astype(np.float32), axis=0)).mean((1, 2, 3))
    return np.append(np.inf, moved)


_THUMBNAIL = 64


@dataclass(frozen=True)
class Frame(EncodedImage):
    """A frame of a clip; the first that is read decodes all that were chosen of it."""

    clip: Clip | None = None
    place: int = 0
    problem: InvalidSample | None = None

    @property
    def size(self) -> tuple[int, int] | None:
        """(H, W), as it is shown; None where the clip could not be opened."""
        return None if self.clip is None else self.clip.size

    def read(self, most: int = 0) -> bytes:
        """An image without losses; InvalidSample where the clip is damaged."""
        if self.problem is not None:
            raise self.problem
        assert self.clip is not None
        return self.clip.frame(self.place)

    def release(self) -> None:
        """Drop the decoded frames of the clip."""
        if self.clip is not None:
            self.clip.release()


class Clip:
    """A file of video: when its frames are shown, and pixels of some.

    Opening reads the file once for the times of its packets, and decodes its first frame. Frames are chosen by `choose`.
    Decoding goes forward, and from one key frame to a later one where frames between are not wanted. Chosen frames are held
    until `release`. Raises InvalidSample where the file cannot be read, and ValueError without PyAV.
    """

    def __init__(self, video: EncodedImage) -> None:
        self.name = video.name
        own = video.content
        self._content = video.read(own.size) if isinstance(own, Span) else own
        self._chosen = np.zeros(0, np.int64)
        self._frames: list[bytes] = []
        stamps, keys = [], []
        with self._opened() as container:
            stream = container.streams.video[0]
            self._base = stream.time_base
            for packet in container.demux(stream):
                if packet.pts is not None and not packet.is_corrupt:
                    stamps.append(packet.pts)
                    if packet.is_keyframe:
                        keys.append(packet.pts)

        if not stamps:
            raise self._damaged("it has no frame with a time")
        self._stamps, self._keys = np.unique(stamps), np.unique(keys)
        #: Seconds (F,) at which frames are shown, from 0.
        self.times = (self._stamps - self._stamps[0]) * float(self._base)
        first = next(self._decoded(self._stamps[:1]))
        self.size: tuple[int, int] = first.shape[:2]

    def choose(self, config: VideoConfig) -> np.ndarray:
        """Numbers of the frames that are taken, ascending. "top_k" decodes all candidates, and holds a thumbnail of each."""
        candidates = at_rate(self.times, config.fps)
        if config.sampling == "first_last":
            candidates = np.unique(np.append(candidates, len(self.times) - 1))
        if config.sampling == "top_k" and len(candidates) > config.max_frames:
            scores = score_of(config.score)(self._thumbnails(candidates))
            if np.shape(scores) != candidates.shape:
                rule = f"must give {len(candidates)} numbers, one for each thumbnail, and gave the shape {np.shape(scores)}"
                value = config.score
                raise invalid("video.score", "shape", value, rule, "correct it", kind=ProblemError)
            taken = best(np.asarray(scores), config.max_frames)
        else:
            ends = config.sampling == "first_last"
            taken = spread(len(candidates), config.max_frames, ends=ends)
        self._chosen, self._frames = candidates[taken], []
        return self._chosen

    def frame(self, place: int) -> bytes:
        """A chosen frame as a file of an image without losses."""
        if not self._frames:
            self._frames = [_bitmap(f) for f in self._decoded(self._stamps[self._chosen])]
        return self._frames[place]

    def release(self) -> None:
        """Drop the frames that were decoded; they are decoded again when one is asked for."""
        self._frames = []

    def _thumbnails(self, numbers: np.ndarray) -> np.ndarray:
        from PIL import Image

        size = (_THUMBNAIL, _THUMBNAIL)
        frames = self._decoded(self._stamps[numbers])
        return np.stack([np.asarray(Image.fromarray(frame).resize(size)) for frame in frames])

    def _decoded(self, stamps: Sequence[int] | np.ndarray) -> Iterator[np.ndarray]:
        """Pixels (H, W, 3) of the frames of ascending stamps; InvalidSample where one is missing."""
        left = [int(stamp) for stamp in stamps]
        # containers that seek by other times (AVI) land after what was asked for: then all is decoded
        for frames in (self._from_keys, self._from_start):
            with self._opened() as container:
                for frame in frames(container, left):
                    if frame.pts == left[0]:
                        left.pop(0)
                        yield _upright(frame)
                    if not left:
                        return
        seconds = (left[0] - int(self._stamps[0])) * float(self._base)
        raise self._damaged(f"no frame at {seconds:.2f} s")

    def _from_keys(self, container: Any, left: list[int]) -> Iterator[Any]:
        """Frames after the key frames of those that are `left`, until one is missing."""
        stream = container.streams.video[0]
        while left:
            key, wanted = self._key_of(left[0]), len(left)
            if key > 0:
                container.seek(int(self._keys[key]), stream=stream)
            for frame in self._frames_of(container, stream):
                yield frame
                if left and self._key_of(left[0]) != key:
                    break
            if len(left) == wanted:
                return

    def _from_start(self, container: Any, left: list[int]) -> Iterator[Any]:
        return self._frames_of(container, container.streams.video[0])

    def _key_of(self, stamp: int) -> int:
        """Number of the key frame that decoding a frame begins at; at most 0 for the first."""
        return int(np.searchsorted(self._keys, stamp, side="right")) - 1

    def _frames_of(self, container: Any, stream: Any) -> Iterator[Any]:
        import av

        try:
            yield from container.decode(stream)
        except (av.error.FFmpegError, OSError) as error:
            raise self._damaged(str(error)) from None

    def _opened(self) -> Any:
        try:
            import av
        except ImportError:
            rule, fix = "videos need PyAV", "pip install 'forge-vlm[video]'"
            raise invalid("", "requires", ..., rule, fix, kind=ProblemError) from None

        content = self._content
        try:
            if isinstance(content, Path):
                try:
                    os.close(open_regular(content, InvalidSample)[0])
                except OSError as error:
                    raise unreadable(self.name, content, error) from None
            opened = av.open(io.BytesIO(content) if isinstance(content, bytes) else str(content))
        except InvalidSample as error:
            raise InvalidSample(error.problems, self.name) from None
        except (av.error.FFmpegError, OSError) as error:
            raise self._damaged(str(error)) from None

        if not opened.streams.video:
            opened.close()
            raise self._damaged("it has no stream of video")
        return opened

    def _damaged(self, words: str) -> Any:
        rule = f"cannot be decoded as video ({words:.100})"
        fix = "restore it, or set corrupt = 'mask' or 'skip'"
        return invalid("", "damaged", ..., rule, fix, where=self.name)


def expanded(record: Record, config: VideoConfig, *, keep: bool) -> tuple[Record, bool]:
    """A record whose videos are frames, each after its time, and whether all could be opened.

    With `keep` a damaged video is one frame that cannot be read; without, InvalidSample is raised.
    """
    if not any(isinstance(picture, Video) for picture in record.pictures):
        return record, True
    pictures: list[EncodedImage] = []
    places: list[tuple[str | int, ...]] = []
    good = True

    for picture in record.pictures:
        found: list[tuple[str, EncodedImage]] = [("", picture)]
        if isinstance(picture, Video):
            try:
                found = _frames(picture, config)
            except InvalidSample as error:
                if not keep:
                    raise
                found, good = [("", Frame(picture.name, b"", problem=error))], False
        parts: list[str | int] = []
        for text, frame in found:
            parts += [text, len(pictures)] if text else [len(pictures)]
            pictures.append(frame)
        places.append(tuple(parts))

    messages = tuple(replace(m, parts=tuple(_placed(m, places))) for m in record.messages)
    return replace(record, messages=messages, pictures=tuple(pictures)), good


def _placed(message: Message, places: Sequence[tuple[str | int, ...]]) -> Iterator[str | int]:
    for part in message.parts:
        yield from (part,) if isinstance(part, str) else places[part]


def _frames(video: Video, config: VideoConfig) -> list[tuple[str, EncodedImage]]:
    clip = Clip(video)
    found: list[tuple[str, EncodedImage]] = []
    for place, number in enumerate(clip.choose(config)):
        text = f"<{clip.times[number]:.1f} seconds>" if config.timestamps else ""
        found.append((text, Frame(f"{video.name}, frame {number}", b"", clip, place)))
    return found


def _upright(frame: Any) -> np.ndarray:
    """Pixels (H, W, 3), turned as the file says it is to be shown."""
    pixels: np.ndarray = frame.to_ndarray(format="rgb24")
    return np.ascontiguousarray(np.rot90(pixels, round(frame.rotation / 90)))


def _bitmap(pixels: np.ndarray) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "BMP")
    return file.getvalue()
