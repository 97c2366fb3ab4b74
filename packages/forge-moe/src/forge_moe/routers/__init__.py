"""Routers: ids and weights of experts for tokens."""

from forge_moe.routers.registry import find_rule
from forge_moe.routers.router import Routed, Router
from forge_moe.routers.rules import RoutingRule

__all__ = ["Routed", "Router", "RoutingRule", "find_rule"]
