"""The order in which a test changes names on the disk and syncs them."""

import os


def record_calls(monkeypatch, names=("fsync", "rename")):
    """A list that grows by (name, path) after each of these calls of `os`; of a rename the source.

    Kills never lose the page cache, so only the order of calls shows what a power failure leaves.
    """
    calls = []

    def record(name, real):
        def call(path, *args, **kwargs):
            shown = os.readlink(f"/proc/self/fd/{path}") if name == "fsync" else os.fspath(path)
            result = real(path, *args, **kwargs)
            calls.append((name, shown))
            return result

        monkeypatch.setattr(os, name, call)

    for name in names:
        record(name, getattr(os, name))
    return calls
