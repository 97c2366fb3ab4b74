"""Reversible maps between Hugging Face tensor names and Forge's; tensors are streamed one by one."""

from forge_ckpt.hf.rows import Op, Row, check_rows
from forge_ckpt.hf.stream import to_forge, to_hf

__all__ = ["Op", "Row", "check_rows", "to_forge", "to_hf"]
