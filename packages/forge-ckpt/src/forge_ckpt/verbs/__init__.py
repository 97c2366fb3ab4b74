"""The commands of forge-ckpt: those that look, and those that write. Each returns its exit code."""
