"""Verified, atomic checkpoints behind torch.distributed.checkpoint."""
