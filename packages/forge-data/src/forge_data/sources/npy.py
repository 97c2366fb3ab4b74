"""Token ids in `.npy` files of numpy: arrays of one dim of integers, memory-mapped."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np

from forge_data._shared.problems import invalid
from forge_data.config import DTYPES
from forge_data.errors import InvalidData
from forge_data.sources.id_shards import IdShards, Shard, find_shards

__all__ = ["open_npy"]

_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def open_npy(
    path: str | Path, split: str = "train", eos_id: int | None = None, bos_id: int | None = None
) -> IdShards:
    """One `.npy` file, or a folder of them in sorted order as one source (`find_shards`).

    Documents end with `eos_id` or begin with `bos_id`. Raises InvalidData for files that are damaged, hold objects (a
    pickle runs code) or anything else but integers in one dim. Usage: `open_npy("shards", bos_id=50256)`.
    """
    shards = [_shard(file) for file in find_shards(path, split, ".npy", "npy")]
    return IdShards(shards, "npy", eos_id=eos_id, bos_id=bos_id)


def _shard(path: Path) -> Shard:
    try:
        with path.open("rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shape, _, dtype = _HEADERS[np.lib.format.read_magic(file)](file)
            offset = file.tell()
    except OSError:
        raise
    except Exception as error:  # the header is text for Python's parser, which fails in many ways
        rule = f"must begin with a header of numpy's .npy format 1.0 or 2.0 ({type(error).__name__}: {error})"
        fix = "copy it again, or save it with numpy.save"
        raise invalid("", "header", ..., rule, fix, where=path, kind=InvalidData) from None
    if dtype.name not in DTYPES or dtype.byteorder == ">" or len(shape) != 1:
        rule = f"in {len(shape)} dims must be little-endian {', '.join(DTYPES)} in one"
        fix = 'save its ids with numpy.save(path, ids.reshape(-1).astype("<u4"))'
        raise invalid("dtype", "unsupported", dtype.str, rule, fix, where=path, kind=InvalidData)
    shard = Shard(path, dtype.name, offset, math.prod(shape))
    shard.check_size()
    return shard
