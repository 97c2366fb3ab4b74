"""The order in which a test syncs and renames."""

import os


def record_calls(monkeypatch):
    """A list that grows by ("fsync", path) and ("rename", source)."""
    calls, fsync, rename = [], os.fsync, os.rename

    def recorded_fsync(fd):
        calls.append(("fsync", os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    def recorded_rename(source, target):
        calls.append(("rename", str(source)))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    return calls
