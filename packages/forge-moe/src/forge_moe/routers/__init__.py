"""Routers: from tokens to experts and weights."""

from forge_moe.routers.registry import find_rule
from forge_moe.routers.router import Routed, Router
from forge_moe.routers.rules import Rule

__all__ = ["Routed", "Router", "Rule", "find_rule"]
