"""Dispatchers: they move tokens to experts and the experts' outputs back (`forge_moe.protocols.Dispatcher`)."""

from forge_moe.dispatch.all_to_all import AllToAllDispatch, HierarchicalDispatch, Splits
from forge_moe.dispatch.local import LocalDispatch
from forge_moe.protocols import Dispatched

__all__ = ["AllToAllDispatch", "Dispatched", "HierarchicalDispatch", "LocalDispatch", "Splits"]
