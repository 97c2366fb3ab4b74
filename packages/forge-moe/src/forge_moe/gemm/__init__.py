"""Grouped GEMM: products of sorted rows with stacks of expert matrices."""

from forge_moe.gemm.choose import choose_backend
from forge_moe.gemm.feed_forward import GroupedFeedForward
from forge_moe.gemm.groups import Groups

__all__ = ["GroupedFeedForward", "Groups", "choose_backend"]
