"""Loading: verify all needed blocks, then change all of the state or nothing."""
