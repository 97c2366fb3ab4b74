"""Counts of this process so far, for differences: `before = counted(); work(); print(counted() - before)`."""

from __future__ import annotations

import ctypes
import json
from collections import Counter


def counted() -> Counter[str]:
    library = ctypes.CDLL("libcuda.so.1")  # the one that is loaded
    library.null_gpu_counts.restype = ctypes.c_size_t
    text = ctypes.create_string_buffer(1 << 16)
    library.null_gpu_counts(text, ctypes.c_size_t(len(text)))
    return Counter(json.loads(text.value))
