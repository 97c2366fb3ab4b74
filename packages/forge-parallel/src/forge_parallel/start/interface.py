"""Which network interface gloo should use where its own choice, the host name's address, is wrong."""

from __future__ import annotations

import os
import socket
import struct
import sys

_VARIABLE = "GLOO_SOCKET_IFNAME"
_LOOPBACK_NAMES = ("lo", "lo0")
_SIOCGIFADDR = 0x8915  # Linux


def choose_interface(address: str | None) -> bool:
    """Set GLOO_SOCKET_IFNAME if that is needed and the user has not; True if it was set here.

    `address` None: all ranks share this host's loopback, so use it and need no name at all. Otherwise
    the ranks are on several hosts, and `address` is where rank 0 is reached: if this host's own name
    means loopback (Debian's 127.0.1.1) or nothing, gloo would tell the others an address that leads
    to themselves; use the interface that leads to `address` (IPv4, Linux).
    """
    if _VARIABLE in os.environ:
        return False
    if address is None:
        name = next((name for _, name in socket.if_nameindex() if name in _LOOPBACK_NAMES), None)
    else:
        name = None if _own_name_is_good() else _towards(address)
    if name is not None:
        os.environ[_VARIABLE] = name
    return name is not None


def release_interface() -> None:
    """Take back what `choose_interface` set."""
    os.environ.pop(_VARIABLE, None)


def _own_name_is_good() -> bool:
    """True if this host's name means an address of this host that others may reach."""
    try:
        address = socket.gethostbyname(socket.gethostname())
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
            own.bind((address, 0))
    except OSError:
        return False
    return not address.startswith("127.")


def _towards(address: str) -> str | None:
    """Name of the interface whose address a packet to `address` would carry; None if it is loopback."""
    if not sys.platform.startswith("linux"):
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as packet:
        try:
            packet.connect((address.removeprefix("::ffff:"), 9))  # sends nothing
        except OSError:
            return None
        local = packet.getsockname()[0]
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(packet, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(answer[20:24]) == local:
                return None if name in _LOOPBACK_NAMES else name
    return None
