"""Digests of blocks by name: sha256 of the standard library, blake3 of the extra ``[fast]``."""

import hashlib
from collections.abc import Callable

from forge_ckpt._shared.problems import invalid

DEFAULT = "sha256"
NAMES = (DEFAULT, "blake3")
Digest = Callable[[bytes | memoryview], str]  # 64 hex digits; releases the GIL for a block


def digest_function(name: str) -> Digest:
    """The function of the digest ``name``.

    Both are cryptographic hashes of 256 bits: no damage and no swap of blocks keeps either. Per
    thread, sha256 with SHA extensions takes 1-2 GB/s and blake3 with AVX2 or AVX-512 takes 4-6.
    Raises ValueError for another name, and for blake3 where the package is not installed.
    """
    if name not in NAMES:
        raise invalid("digest", "unknown", name, f"must be one of {', '.join(NAMES)}")
    if name == DEFAULT:
        return lambda data: hashlib.sha256(data).hexdigest()
    try:
        from blake3 import blake3
    except ImportError:
        rule, fix = "needs the package blake3", "pip install 'forge-ckpt[fast]'"
        raise invalid("digest", "requires", name, rule, fix) from None
    return lambda data: blake3(data).hexdigest()
