"""Routers by name: built in, from entry points, or by import path."""

from importlib import import_module
from importlib.metadata import entry_points

from forge_moe._shared.problems import invalid
from forge_moe.routers.rules import EXPERT_CHOICE, SIGMOID_TOPK, SOFTMAX_TOPK, UNIFORM, RoutingRule

_BUILT_IN = {
    "softmax_topk": SOFTMAX_TOPK,
    "sigmoid_topk": SIGMOID_TOPK,
    "expert_choice": EXPERT_CHOICE,
    "uniform": UNIFORM,
}
_GROUP = "forge.routers"


def find_rule(name: str) -> RoutingRule:
    """The routing rule of that name: built in, an entry point of group `forge.routers`, or "module:attribute".

    Raises ValueError for an unknown name, a path to anything but a RoutingRule, and `gradient_scale`.
    """
    if name == "gradient_scale":
        rule = (
            "is not supported: it multiplies the layer's output in training and not in evaluation, so the two are "
            "different functions"
        )
        fix = "scale the learning rate of the experts, or use route_scale, which acts in both"
        raise invalid("router", "unsupported", name, rule, fix)
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    if ":" in name:
        return _checked(name, _import(name))
    offered = {point.name: point for point in entry_points(group=_GROUP)}
    if name in offered:
        return _checked(name, offered[name].load())

    known = ", ".join(sorted({*_BUILT_IN, *offered}))
    fix = f"use one of {known}, or module:attribute"
    raise invalid("router", "unknown", name, "is unknown", fix)


def _import(path: str) -> object:
    module, _, attribute = path.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        rule = f"cannot be imported ({error})"
        raise invalid("router", "not_found", path, rule, "check the path") from error


def _checked(name: str, found: object) -> RoutingRule:
    if not isinstance(found, RoutingRule):
        rule = f"must be a forge_moe.RoutingRule, and is a {type(found).__name__}"
        raise invalid("router", "type", name, rule, "make one from score, choose and weigh")
    return found
