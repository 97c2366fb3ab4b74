"""What a rank knows about itself and its job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Launcher = Literal["none", "torchrun", "slurm", "environment"]
LOOPBACK = "127.0.0.1"


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
