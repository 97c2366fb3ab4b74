"""What a rank knows about itself and its job, and the variables that it is read from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Environ = Mapping[str, str]
Launcher = Literal["none", "torchrun", "slurm", "environment"]
LOOPBACK = "127.0.0.1"
STORE_FD = "FORGE_STORE_FD"
"""Set by `run_local_workers` for rank 0: a descriptor that listens on MASTER_PORT already."""


@dataclass(frozen=True)
class World:
    """This process among the processes of its job.

    `address` and `port` are where rank 0 (or torchrun's agent) is met; with one rank they mean
    nothing. `local_rank` counts the ranks on this host: the index of a rank's GPU.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    address: str = LOOPBACK
    port: int = 0
    launcher: Launcher = "none"

    @property
    def where(self) -> str:
        """`address:port`."""
        return f"{self.address}:{self.port}"


def is_loopback(address: str) -> bool:
    """True for an address that means the host on which it is read."""
    return address in ("localhost", "::1") or address.startswith("127.")


def integer(
    environ: Environ, name: str, fix: str, *, least: int = 0, below: tuple[str, int] | None = None
) -> int:
    """`environ[name]` as an int of at least `least`, and below a (name, value) if one is given.

    Raises ValueError that names the variable, its value, the rule and `fix`.
    """
    if name not in environ:
        raise ValueError(f"{name} must be set here and is not; {fix}")
    text = environ[name]
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"{name} {text!r} must be an integer; {fix}") from None
    if value < least:
        raise ValueError(f"{name} {value} must be at least {least}; {fix}")
    if below is not None and value >= below[1]:
        raise ValueError(f"{name} {value} must be below {below[0]} {below[1]}; {fix}")
    return value


def port(environ: Environ, fix: str) -> int:
    """MASTER_PORT as a port number. Raises ValueError as `integer` does."""
    return integer(
        environ, "MASTER_PORT", fix, least=1, below=("the end of the port range,", 65536)
    )
