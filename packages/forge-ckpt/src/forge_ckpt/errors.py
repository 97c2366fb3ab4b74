"""Exceptions, one class for each reaction of a caller."""


def one_line(text: str, limit: int | None = 300) -> str:
    """The first ``limit`` characters of ``text``; escapes for what no log or terminal should get, which names
    from a disk may hold."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:limit])


class CorruptCheckpoint(RuntimeError):
    """The bytes on disk are not those that were saved. The message names the file and the bytes."""


class CheckpointMismatch(ValueError):
    """The checkpoint is sound, but of another state: shapes, dtypes or names differ."""


class StateRefused(RuntimeError):
    """A ``load_state_dict`` raised after other objects had been loaded (internal)."""


class StepExists(ValueError):
    """This step is already saved with another content; nothing on disk is replaced."""


class StoreInUse(RuntimeError):
    """Another live process writes to the store. The message names it."""
