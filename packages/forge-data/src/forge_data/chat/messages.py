"""A record is a conversation, or one line says why it is none."""

from __future__ import annotations

from typing import Any, NamedTuple

from forge_data.chat.config import ChatConfig
from forge_data.chat.records import Record
from forge_data.errors import InvalidData

__all__ = ["ROLES", "Conversation", "conversation_of"]

ROLES = ("assistant", "developer", "function", "ipython", "system", "tool", "user")
_BODIES = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")


class Conversation(NamedTuple):
    """Messages as a template gets them; `weights` has the factor of each message's loss."""

    place: str
    messages: list[dict[str, Any]]
    weights: list[float]
    tools: list[Any] | None


def conversation_of(record: Record, config: ChatConfig) -> Conversation:
    """The conversation of a record. Raises InvalidData naming its place and the message."""
    place, content = record
    if not isinstance(content, dict):
        raise InvalidData(
            f"{place} must be a JSON object, not {type(content).__name__}; give it {config.messages_field!r}"
        )
    found = content.get(config.messages_field)
    if not isinstance(found, list):
        keys = ", ".join(map(str, content))[:200]
        raise InvalidData(
            f"{place} must have a list {config.messages_field!r} (it has: {keys}); name its key with messages_field"
        )
    if not found:
        raise InvalidData(f"{place} must have at least one message; leave the conversation out")
    messages, weights = [], []
    for number, message in enumerate(found):
        problem = _problem(message, config)
        if problem:
            raise InvalidData(f"{place} message {number} {problem}")
        weights.append(float(1.0 if message.get("weight") is None else message["weight"]))
        # Tables (parquet, datasets) have every key in every message, with nothing in most.
        messages.append({k: v for k, v in message.items() if v is not None and k != "weight"})
    return Conversation(place, messages, weights, _tools(place, content, config.tools_field))


def _problem(message: Any, config: ChatConfig) -> str | None:
    if not isinstance(message, dict):
        return f"must be an object with role and content, not {type(message).__name__}; correct it"
    role, content, weight = (message.get(key) for key in ("role", "content", "weight"))
    if role not in ROLES:
        return f"has role {role!r:.40}, which must be one of {', '.join(ROLES)}; correct it"
    if content is None and not any(message.get(body) for body in _BODIES):
        return "has no content; give it a string"
    if content is not None and not isinstance(content, str):
        return f"has a {type(content).__name__} as content, which must be a string; give its text"
    if weight is None:
        return None
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < 1e6:
        return f"has weight {weight!r:.40}, which must be a number from 0 to 10**6; correct it"
    if weight not in (0, 1) and role != "assistant" and config.train_on != "all":
        return f'has weight {weight} and role {role!r}, of which nothing is learnt; remove it, or set train_on = "all"'
    return None


def _tools(place: str, content: dict[str, Any], key: str | None) -> list[Any] | None:
    tools = content.get(key) if key is not None else None
    if tools is None or (isinstance(tools, list) and all(isinstance(t, dict) for t in tools)):
        return tools or None
    raise InvalidData(
        f"{place} has {key!r} that must be a list of JSON schemas; correct it, or remove tools_field"
    )
