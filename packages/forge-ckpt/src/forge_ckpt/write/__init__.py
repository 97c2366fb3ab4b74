"""Saving: copy tensors into blocks, digest and write the blocks, commit by a rename."""
