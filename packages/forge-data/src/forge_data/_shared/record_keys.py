# Copied from scripts/shared/record_keys.py; edit that file, then run scripts/copy_shared.py.
"""The keys of records: what is read, what would be lost, and what is left alone and counted.

keys = RecordKeys(ignored=("tools",))
read = Keys(frozenset({"text"}))
keys.check(read, {"text": "a", "id": 7}, "a.jsonl line 3")
keys.counts                                                                 # Counter({"id": 1})
keys.check(read, {"text": "a", "images": ["a.png"]}, "a.jsonl line 4")      # raises
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from .problems import Problem, ProblemError, WithProblems

MEDIA = ("audio", "audios", "image", "image_url", "images", "video", "video_url", "videos")
TOOLS = ("chat_template_kwargs", "function_call", "functions", "tool_calls", "tools")
WEIGHTS = (
    *("loss", "loss_mask", "loss_scale", "loss_weight", "mask", "masked", "train", "train_detail", "train_on_turn"),
    *("trainable", "training", "training_detail", "weight", "weights"),
)  # fmt: skip
SAID = ("conversations", "messages", "reasoning", "reasoning_content", "system", "system_prompt", "thinking")  # fmt: skip
#: Names under which known layouts keep what a model is trained on, or how.
CONTENT = frozenset((*MEDIA, *TOOLS, *WEIGHTS, *SAID))
_SHORT = 4  # names below it are near too many others
_NAMED = 12  # keys that a line names


def is_empty(value: Any) -> bool:
    """Whether a key says nothing, as those that a table gives to all rows."""
    return value is None or (isinstance(value, str | list | tuple | dict) and not value)


@dataclass(frozen=True)
class Keys:
    """Keys of one kind of object: `read`, and `content` that would be lost; `inside` names the key that holds the object."""

    read: frozenset[str]
    content: frozenset[str] = CONTENT
    inside: str = ""


class RecordKeys:
    """Keys of the records of one source that are not read, counted by name in `counts`.

    A key whose content would be lost raises an error: one of `content`, one within an edit of a key that is read, and with
    `strict` any other. Those of `ignored` are counted alone; `messages.loss` is `loss` in messages. Empty values are none.
    """

    def __init__(
        self,
        ignored: Collection[str] = (),
        strict: bool = False,
        kind: type[WithProblems] = ProblemError,
    ) -> None:
        self.ignored, self.strict, self.kind = frozenset(ignored), strict, kind
        self.counts: Counter[str] = Counter()

    def check(self, keys: Keys, record: Mapping[str, Any], where: object) -> None:
        """Count what is not read of an object at `where`; raises `kind` for what would be lost."""
        for key, value in record.items():  # in their order, as all ranks raise the same error
            if key in keys.read or is_empty(value):
                continue
            name = f"{keys.inside}.{key}" if keys.inside else str(key)
            if not self.ignored & {key, name}:
                problem = self._problem(keys, key, name, value)
                if problem is not None:
                    raise self.kind([problem], str(where))
            self.counts[name] += 1

    def _problem(self, keys: Keys, key: Any, name: str, value: Any) -> Problem | None:
        fix = f"list {name!r} in ignore_keys"
        if key in keys.content:
            rule = "has content that is not read here, and would be lost"
            return Problem(name, "not_read", value, rule, f"remove it, or {fix}")
        if near := _near(str(key), keys.read):
            rule = f"is not read, and its name is nearly {near}"
            return Problem(name, "misspelt", value, rule, f"correct it, or {fix}")
        if self.strict:
            rule = "is not read, and strict is True"
            return Problem(name, "strict", value, rule, f"remove it, or {fix}")
        return None


def unread_keys(counts: Mapping[str, int]) -> str:
    """The end of a line about a source: keys that are not read, and how many records have each; empty without any."""
    most = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{name} ({count:,})" for name, count in most[:_NAMED]]
    shown += [f"{len(most) - _NAMED} others"] if len(most) > _NAMED else []
    return f"; keys not read: {', '.join(shown)}" if shown else ""


def option_problems(ignored: Any, strict: Any) -> Iterator[Problem]:
    """Problems of `ignore_keys` and `strict` as options."""
    if not isinstance(ignored, list | tuple) or not all(isinstance(k, str) and k for k in ignored):
        yield Problem("ignore_keys", "type", ignored, "must be a list of keys", "use []")
    if not isinstance(strict, bool):
        yield Problem("strict", "type", strict, "must be true or false", "use false")


@lru_cache(4096)
def _near(key: str, read: frozenset[str]) -> str:
    """A name of `read` that one edit makes of `key`: a letter more, less or other, or two neighbors swapped."""
    return next((n for n in sorted(read) if len(n) >= _SHORT and _is_edit(key, n)), "")


def _is_edit(a: str, b: str) -> bool:
    first = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    a, b = a[first:], b[first:]
    return a[1:] in (b, b[1:]) or a == b[1:] or (a[:2] == b[1::-1] and a[2:] == b[2:])
