"""Token files: their format, readers, writer and cache."""
