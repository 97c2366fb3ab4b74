"""What can go wrong, one type per thing that a caller would do about it."""


class CorruptCheckpoint(RuntimeError):
    """The bytes on disk are not those that were saved. The message says which file and where."""


class CheckpointMismatch(ValueError):
    """The checkpoint is sound but of another state: shapes, dtypes or names differ."""


class StateRefused(RuntimeError):
    """An object's own ``load_state_dict`` raised, after other objects were loaded (internal)."""


class StepExists(ValueError):
    """This step is already saved with another content; nothing on disk is replaced."""


class StoreInUse(RuntimeError):
    """Another live process writes to the store. The message names it."""
