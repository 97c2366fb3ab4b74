"""Reading: verify the blocks that are needed, then hand over everything or nothing."""
