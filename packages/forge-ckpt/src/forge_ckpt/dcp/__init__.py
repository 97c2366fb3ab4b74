"""Checkpoints of torch.distributed.checkpoint itself, read and written by ``forge-ckpt convert`` alone."""

from forge_ckpt.dcp.convert import convert_from_dcp
from forge_ckpt.dcp.export import convert_to_dcp

__all__ = ["convert_from_dcp", "convert_to_dcp"]
