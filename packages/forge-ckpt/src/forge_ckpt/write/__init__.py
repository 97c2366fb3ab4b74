"""Writing: stage into blocks, digest and write them, commit by rename."""
