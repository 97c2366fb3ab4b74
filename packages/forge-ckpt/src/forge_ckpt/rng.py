"""The random number generators of a job as checkpoint state: one stream for each rank."""

import hashlib
import logging
import random
import sys
from typing import Any

import torch
import torch.distributed as dist

from forge_ckpt._shared.problems import ProblemError, invalid
from forge_ckpt.protocols import Path

__all__ = ["RNGState", "logger", "seed_process"]

logger = logging.getLogger("forge_ckpt")
_UNUSABLE = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError)


class RNGState:
    """Each rank's generators: Python's, torch's CPU and CUDA ones, and numpy's if it is imported.

    Usage: ``state = {"model": model, "rng": RNGState()}``. Ranks are those of ``group`` (the store's
    group, if it has one), else of the default group; a single process is rank 0 of 1. A single process
    saves the generators of all visible CUDA devices, one of several ranks that of its current device.

    ``alike`` neighboring ranks draw the same numbers (as a tensor parallel group must, for dropout)
    and share a stream: there are ``ranks / alike`` streams.

    With as many streams as were saved, each continues bit-equal. With another number, all streams are
    new: the seed is the sha256 of (saved stream ``i % saved``, number of streams now, i). They differ
    from each other and from those of any other number; the same change gives the same streams again.

    Torch's states are uint8 tensors, the others plain tuples. A load reads one saved stream.
    Reading the state draws no number and costs no device sync of consequence.
    """

    # The saved structure (streams, devices, numpy) may differ from this process's: replace, not fill.
    load_replaces = True

    def __init__(self, group: dist.ProcessGroup | None = None, *, alike: int = 1) -> None:
        self._group, self._alike = group, alike

    def state_dict(self) -> dict[str, Any]:
        """``{"world_size": n, "streams": {number: stream}}`` with this rank's stream only; n streams in all.

        A stream is ``{"python", "torch", "cuda": {device: state} | None, "numpy": tuple | None}``.
        """
        stream, streams = self._stream_index()
        return {"world_size": streams, "streams": {stream: _stream()}}

    def load_selects(self, saved: list[Path]) -> list[Path]:
        """The saved paths that this rank loads: those of one stream, its own if it was saved."""
        streams = {path[1] for path in saved if len(path) > 1 and path[0] == "streams"}
        if not streams:
            return saved  # format of 0.1: one stream
        source = self._stream_index()[0] % len(streams)
        return [path for path in saved if path[:1] != ("streams",) or path[1:2] == (source,)]

    def load_checks(self, state_dict: Any) -> None:
        """Load the saved stream into new generators; raises ValueError if one of them refuses it."""
        try:
            saved, stream = self._saved(state_dict)
            if type(saved) is not int or saved < 1:
                raise invalid("world_size", "range", saved, "must be a number of streams")
            random.Random().setstate(stream["python"])
            torch.Generator().set_state(stream["torch"])
            for state in (stream["cuda"] or {}).values():
                # A CUDA generator has a seed and an offset, of 8 bytes each.
                if state.dtype != torch.uint8 or state.numel() < 16:
                    rule = f"elements of {state.dtype} are not the state of a CUDA generator"
                    raise invalid("cuda", "length", state.numel(), rule)

            if stream["numpy"] is not None:
                sys.modules["numpy"].random.RandomState().set_state(stream["numpy"])
        except ProblemError:
            raise
        except _UNUSABLE as error:
            rule = f"is not a random state that RNGState saved ({error!r:.300})"
            raise invalid("", "damaged", ..., rule) from error

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the saved stream, or start one that is derived from it (see the class)."""
        number, count = self._stream_index()
        saved, stream = self._saved(state_dict)
        if saved == count:
            _continue(stream)
        else:
            _start(stream, number, count)

    def _saved(self, state_dict: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """(number of saved streams, the saved stream that this rank continues or derives one from)."""
        if "streams" not in state_dict:
            return 1, state_dict  # format of 0.1: one stream
        saved = state_dict["world_size"]
        return saved, state_dict["streams"][self._stream_index()[0] % saved]

    def _stream_index(self) -> tuple[int, int]:
        """(number of this rank's stream, number of streams)."""
        if not (dist.is_available() and dist.is_initialized()):
            return 0, 1
        rank, size = dist.get_rank(self._group), dist.get_world_size(self._group)
        return rank // self._alike, size // self._alike


def seed_process(seed: int, stream: int) -> None:
    """Begin this process's generators, torch's, Python's and numpy's if it is imported: a function of (seed, stream)."""
    digest = hashlib.sha256(f"{seed}:{stream}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    random.seed(digest)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(numpy.frombuffer(digest, numpy.uint32))


def _alone() -> bool:
    """Whether no other rank draws numbers."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1


def _stream() -> dict[str, Any]:
    """The states of this process's generators, as ``RNGState.state_dict`` describes them."""
    cuda = None
    if torch.cuda.is_available():
        states = torch.cuda.get_rng_state_all() if _alone() else [torch.cuda.get_rng_state()]
        cuda = dict(enumerate(states))
    numpy = sys.modules.get("numpy")
    return {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "numpy": None if numpy is None else numpy.random.get_state(),
    }


def _continue(stream: dict[str, Any]) -> None:
    """Set the generators to the states of a saved stream."""
    alone = _alone()
    random.setstate(stream["python"])
    torch.set_rng_state(stream["torch"])
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    used = here if alone else min(here, 1)
    saved = stream["cuda"] or {}
    for device, state in saved.items():
        if device < used:
            torch.cuda.set_rng_state(state, device if alone else "cuda")

    if len(saved) != used:
        logger.warning(
            "random states of %d CUDA devices were saved, %d devices are here: the others keep "
            "their own, so the run will not be bit-equal",
            len(saved),
            used,
        )
    if stream["numpy"] is not None:
        sys.modules["numpy"].random.set_state(stream["numpy"])


def _start(stream: dict[str, Any], number: int, count: int) -> None:
    """Seed the generators from a saved stream, for stream ``number`` of ``count``."""
    digest = hashlib.sha256(f"forge-ckpt stream {number} of {count}\n".encode())
    digest.update(repr(stream["python"]).encode())
    digest.update(bytes(stream["torch"].tolist()))
    seed = digest.digest()
    random.seed(seed)
    torch.manual_seed(int.from_bytes(seed[:8], "big"))  # torch seeds every CUDA device by it, too
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed([int.from_bytes(seed[i : i + 4], "big") for i in range(0, 32, 4)])
