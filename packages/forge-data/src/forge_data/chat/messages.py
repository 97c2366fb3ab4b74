"""A record is a conversation, or one line says why it is none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from forge_data._shared.problems import Problem, invalid, raise_problems
from forge_data._shared.record_keys import Keys, RecordKeys
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


def conversation_of(
    record: Record, config: ChatConfig, keys: RecordKeys | None = None
) -> Conversation:
    """The conversation of a record; `keys` count its keys that are not read, without those of messages, which a template may
    read. Raises InvalidData naming its place and the message."""
    place, content = record
    key, keys = config.messages_field, keys or RecordKeys(kind=InvalidData)
    if not isinstance(content, dict):
        rule, fix = f"must be a JSON object, not {type(content).__name__}", f"give it {key!r}"
        raise invalid("", "type", ..., rule, fix, where=place, kind=InvalidData)
    found = content.get(key)
    if not isinstance(found, list):
        rule = f"must be a list, and the record has {', '.join(map(str, content))[:200]}"
        fix = "name the key of the messages with messages_field"
        raise invalid(key, "missing", ..., rule, fix, where=place, kind=InvalidData)
    if not found:
        rule, fix = "must have at least one message", "leave the conversation out"
        raise invalid(key, "empty", ..., rule, fix, where=place, kind=InvalidData)
    read = {key} if config.tools_field is None else {key, config.tools_field}
    keys.check(Keys(frozenset(read)), content, place)
    messages, weights = [], []
    for number, message in enumerate(found):
        raise_problems(f"{place} message {number}", _problems(message, config), InvalidData)
        weights.append(float(1.0 if message.get("weight") is None else message["weight"]))
        # Tables (parquet, datasets) have every key in every message, with nothing in most.
        messages.append({k: v for k, v in message.items() if v is not None and k != "weight"})
    return Conversation(place, messages, weights, _tools(place, content, config.tools_field))


def _problems(message: Any, config: ChatConfig) -> Iterator[Problem]:
    """The first problem of a message."""
    fix = "correct it"
    if not isinstance(message, dict):
        rule = f"must be an object with role and content, not {type(message).__name__}"
        yield Problem("", "not_an_object", ..., rule, fix)
        return
    role, content, weight = (message.get(key) for key in ("role", "content", "weight"))
    number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    if role not in ROLES:
        yield Problem("role", "unknown", role, f"must be one of {', '.join(ROLES)}", fix)
    elif content is None and not any(message.get(body) for body in _BODIES):
        yield Problem("content", "missing", ..., "must be given", "give it a string")
    elif content is not None and not isinstance(content, str):
        rule = f"must be a string, and is a {type(content).__name__}"
        yield Problem("content", "type", ..., rule, "give its text")
    elif weight is not None and not (number and 0 <= weight < 1e6):
        yield Problem("weight", "range", weight, "must be a number from 0 to 10**6", fix)
    elif weight not in (None, 0, 1) and role != "assistant" and config.train_on != "all":
        rule = f"must be 0 or 1 for role {role!r}, which is not trained"
        yield Problem("weight", "not_trained", weight, rule, 'remove it, or set train_on = "all"')


def _tools(place: str, content: dict[str, Any], key: str | None) -> list[Any] | None:
    tools = content.get(key) if key is not None else None
    if tools is None or (isinstance(tools, list) and all(isinstance(t, dict) for t in tools)):
        return tools or None
    rule, fix = "must be a list of JSON schemas", "correct it, or remove tools_field"
    raise invalid(str(key), "type", tools, rule, fix, where=place, kind=InvalidData)
