"""Environment variables that must be numbers, with errors that name them."""

from __future__ import annotations

from collections.abc import Mapping

Environ = Mapping[str, str]


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
