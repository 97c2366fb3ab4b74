"""Conversations of the layouts of chats and of LLaVA as records.

Images and videos of a record's own keys go to the marks and parts that stand for them, which is where they differ most.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from forge_vlm._config import is_finite, is_size
from forge_vlm._shared.record_keys import CONTENT, Keys, RecordKeys, is_empty
from forge_vlm.data.files import InvalidSample, invalid
from forge_vlm.data.records import ROLES, Caps, EncodedImage, Message, Record, picture_of, video_of

__all__ = ["from_chat", "from_llava", "index_of"]

_LLAVA_ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
_MARKS = {"image": "<image>", "video": "<video>"}
_MEDIA = ("image", "images", "video", "videos")
_CHAT = Keys(frozenset(("messages", "branches", *_MEDIA)))
_LLAVA = Keys(frozenset(("conversations", "branches", *_MEDIA)))
_MESSAGE = Keys(frozenset(("role", "content", "weight")), inside="messages")
_TURN = Keys(frozenset(("from", "value")), CONTENT | {"role", "content"}, "conversations")
_no_keys = partial(RecordKeys, kind=InvalidSample)
_PARTS = {
    "text": Keys(frozenset(("type", "text")), inside="content"),
    "image": Keys(
        frozenset(("type", "image", "image_url", "base64", "path", "url", "index", *Caps._fields)),
        inside="content",
    ),
    "video": Keys(
        frozenset(("type", "video", "video_url", "path", "url", "index", *Caps._fields)),
        inside="content",
    ),
}


@dataclass
class _Slot:
    """A place of an image or a video; without a value it takes the next one of its record."""

    kind: str
    value: Any = None
    part: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        """Whether it takes one of its record: the next one, or the one that it names or counts to."""
        value = self.value
        return (
            value is None
            or type(value) is int
            or (isinstance(value, str) and not value.startswith("data:"))
        )


@dataclass
class _ParsedMessage:
    role: str
    parts: list[str | _Slot]
    weight: float = 1.0


def from_chat(
    name: str, value: Any, folder: Path, asks: bool = False, keys: RecordKeys | None = None
) -> Record:
    """A record of `{"messages": [{"role": ..., "content": text or parts}]}`.

    A part is `{"type": "text", "text": ...}`, or `{"type": "image", "image": ...}` (also "image_url", "video", "video_url",
    "path", "url") of a path below `folder` or a data URI, or `"base64"` in place of "image"; next to an image `min_pixels`
    and `max_pixels` bound its own pixels (resolution "budget"). A message may have a `weight`. One that only `asks` may be
    without an answer. `"branches": [[message, ...], ...]` are several ways to go on after the messages.

    `image` or `images`, `video` or `videos` next to the messages go in order to parts without a value, by name (or `index`,
    from 0) to parts with one; without parts to the marks `<image>` and `<video>` of questions; without marks in front of the
    first question. Without them a mark is text.
    """
    given, keys = value if isinstance(value, Mapping) else {}, keys or _no_keys()
    keys.check(_CHAT, given, name)
    parsed = _messages(name, given.get("messages"), keys)
    branches = [_messages(name, branch, keys) for branch in _branches(name, given)]
    _place(name, "messages", [parsed, *branches], _media(name, given))
    return _built(name, parsed, branches, folder, asks)


def from_llava(
    name: str, value: Any, folder: Path, asks: bool = False, keys: RecordKeys | None = None
) -> Record:
    """A record of LLaVA's JSON: `image` (or `images`) is a path or a list of them, `<image>` in `conversations` their places;
    `video` (or `videos`) likewise, whose place is `<video>`, or `<image>` where the record has no image.

    Those without a mark stand before the first text. One that only `asks` may be without an answer. `"branches":
    [[turn, ...], ...]` are several ways to go on. Raises InvalidSample for another number of marks.
    """
    given, keys = value if isinstance(value, Mapping) else {}, keys or _no_keys()
    keys.check(_LLAVA, given, name)
    media = _media(name, given)
    mark = "video" if media["video"] and not media["image"] else "image"
    parsed = _turns(name, given.get("conversations"), mark, keys)
    branches = [_turns(name, branch, mark, keys) for branch in _branches(name, given)]
    _place(name, "conversations", [parsed, *branches], media)
    return _built(name, parsed, branches, folder, asks)


def _branches(name: str, given: Mapping[str, Any]) -> Sequence[Any]:
    found = given.get("branches") or ()
    if not isinstance(found, Sequence) or isinstance(found, str):
        rule = "must be a list of lists, each of what one branch says"
        raise invalid("branches", "type", found, rule, "correct it", where=name)
    return found


def _media(name: str, given: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Images and videos of a record's own keys."""
    found = {}
    for kind in _MARKS:
        used = [key for key in (kind, f"{kind}s") if not is_empty(given.get(key))]
        if len(used) > 1:
            rule, fix = f"must not be given beside {kind}", "put all in one list"
            raise invalid(used[1], "excludes", given[used[1]], rule, fix, where=name)
        values = given[used[0]] if used else []
        values = list(values) if isinstance(values, list | tuple) else [values]
        # a table gives {"bytes": None, "path": None} where there is no image
        found[kind] = [
            each
            for each in values
            if not all(map(is_empty, each.values() if isinstance(each, Mapping) else (each,)))
        ]
    return found


def _messages(name: str, messages: Any, keys: RecordKeys) -> list[_ParsedMessage]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        rule = "must be a list with one message or more"
        raise invalid("messages", "type", messages, rule, "correct it", where=name)
    found = []

    for message in messages:
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ROLES:
            rule = f"must be one of {', '.join(ROLES)}"
            raise invalid("role", "unknown", role, rule, "correct it", where=name)
        keys.check(_MESSAGE, message, name)
        content = message.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, Sequence):
            rule = "must be text or a list of parts"
            raise invalid("content", "type", content, rule, "correct it", where=name)
        weight = _weight(name, message.get("weight"))
        found.append(_ParsedMessage(role, [_part(name, part, keys) for part in parts], weight))

    return found


def _turns(name: str, turns: Any, mark: str, keys: RecordKeys) -> list[_ParsedMessage]:
    """Turns of LLaVA; `<image>` in them stands for the kind `mark`."""
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        rule = "must be a list with one turn or more"
        raise invalid("conversations", "type", turns, rule, "correct it", where=name)
    found = []
    for turn in turns:
        parsed = turn if isinstance(turn, Mapping) else {}
        role, text = _LLAVA_ROLES.get(str(parsed.get("from"))), parsed.get("value")
        if role is None or not isinstance(text, str):
            rule = "must have 'from' human, gpt or system, and a text 'value'"
            raise invalid("conversations", "turn", turn, rule, "correct it", where=name)
        keys.check(_TURN, parsed, name)
        if role != "assistant":
            text = text.replace(_MARKS["image"], _MARKS[mark])
        found.append(_ParsedMessage(role, [text] if text else []))
    return found


def _weight(name: str, given: Any) -> float:
    weight = 1.0 if given is None else given
    if not is_finite(weight) or weight < 0:
        rule = "of a message must be a finite number of at least 0"
        raise invalid("weight", "range", given, rule, "use 1", where=name)
    return float(weight)


def _part(name: str, part: Any, keys: RecordKeys) -> str | _Slot:
    given = part if isinstance(part, Mapping) else {}
    kind = str(given.get("type")).removesuffix("_url")
    if kind in _PARTS:
        keys.check(_PARTS[kind], given, name)

    if kind == "text" and isinstance(given.get("text"), str):
        text: str = given["text"]
        return text
    if kind not in _MARKS:
        rule = "of a part must be text, image or video, with a value of that name"
        raise invalid("type", "unknown", given.get("type"), rule, "correct it", where=name)

    if kind == "image" and isinstance(given.get("base64"), str):
        return _Slot(kind, f"data:;base64,{given['base64']}", given)
    values = (given.get(key) for key in (kind, f"{kind}_url", "path", "url", "index"))
    value = next((value for value in values if not is_empty(value)), None)
    if isinstance(value, Mapping) and "url" in value:
        value = value["url"]

    return _Slot(kind, value, given)


def _place(
    name: str, key: str, ways: list[list[_ParsedMessage]], media: Mapping[str, list[Any]]
) -> None:
    """Give each image and video of a record its place in `key`; InvalidSample where their numbers differ."""
    parsed = [message for way in ways for message in way]
    for kind in ("video", "image"):  # those without a place go in front: images before videos
        values, mark = media[kind], _MARKS[kind]
        asked = [message for message in parsed if message.role == "user"]  # others only mention it
        slots = [p for m in parsed for p in m.parts if isinstance(p, _Slot) and p.kind == kind]
        marks = sum(p.count(mark) for m in asked for p in m.parts if isinstance(p, str))
        # A mark that stands for nothing is text, but for the images of LLaVA, which has no other way to name them.
        if not values and (key == "messages" or kind == "video"):
            continue

        if slots:
            places = sum(slot.is_open for slot in slots)
        elif marks:
            places = marks
        else:
            first = next((m for m in parsed if m.role == "user"), parsed[0])
            first.parts[:0] = [_Slot(kind, value) for value in values]
            continue

        if places != len(values):
            what = f"parts of type {kind}" if slots else f"marks {mark}"
            rule = f"{what} must be as many as the {kind}s, {len(values)}"
            raise invalid(key, "number", places, rule, "give one for each", where=name)
        if not slots:
            for message in asked:
                message.parts = [*_split(message.parts, kind)]
            slots = [p for m in parsed for p in m.parts if isinstance(p, _Slot) and p.kind == kind]
        _deal(name, [slot for slot in slots if slot.is_open], values)


def _split(parts: list[str | _Slot], kind: str) -> Iterator[str | _Slot]:
    """Parts whose text has a place at each mark."""
    for part in parts:
        if isinstance(part, _Slot):
            yield part
            continue
        for number, text in enumerate(part.split(_MARKS[kind])):
            if number:
                yield _Slot(kind)
            if text:
                yield text


def _deal(name: str, slots: list[_Slot], values: list[Any]) -> None:
    """Values by name or number to the places that have one, in order to the others."""
    left = dict(enumerate(values))
    for slot in sorted(slots, key=lambda slot: slot.value is None):
        index = next(iter(left)) if slot.value is None else slot.value
        if isinstance(index, str):
            index = [*left][index_of(name, index, [*left.values()])]
        if index not in left:
            rule = f"must count the {len(values)} images of its record from 0, each once"
            raise invalid("index", "range", index, rule, "correct it", where=name)
        slot.value = left.pop(index)


def index_of(name: str, wanted: str, values: Sequence[Any]) -> int:
    """Which of `values` has the name `wanted`, full or without folders; InvalidSample where it is not one of them."""
    given = (each.get("path") if isinstance(each, Mapping) else each for each in values)
    names = [each if isinstance(each, str) else "" for each in given]
    if wanted in names:
        return names.index(wanted)
    last = [i for i, each in enumerate(names) if _base(each) == _base(wanted)]
    if len(last) != 1:
        rule = f"must name one of the images of its record, {', '.join(names)[:200]}"
        fix = "correct it, or leave out the name to take them in order"
        raise invalid("image", "unknown", wanted, rule, fix, where=name)
    return last[0]


def _base(path: str) -> str:
    return path.rpartition("/")[2].lower()  # tools that write tars change the case of endings


def _built(
    name: str,
    parsed: list[_ParsedMessage],
    branches: list[list[_ParsedMessage]],
    folder: Path,
    asks: bool,
) -> Record:
    """The record; InvalidSample for images where none may be, and without an answer unless it `asks`."""
    pictures: list[EncodedImage] = []

    def message(given: _ParsedMessage) -> Message:
        parts: list[str | int] = []
        for part in given.parts:
            if isinstance(part, _Slot):
                pictures.append(_opened(name, part, len(pictures), folder))
            parts.append(len(pictures) - 1 if isinstance(part, _Slot) else part)
        return Message(given.role, tuple(parts), given.weight)

    messages = tuple(map(message, parsed))
    ways = tuple(tuple(map(message, branch)) for branch in branches)
    if any(isinstance(p, int) for branch in ways for m in branch for p in m.parts):
        rule, fix = "must not hold a picture, and one has it", "move it to the messages before"
        raise invalid("branches", "picture", ..., rule, fix, where=name)
    if not asks and not all(any(m.role == "assistant" for m in end) for end in ways or (messages,)):
        rule, fix = "must hold an assistant's message to learn", "give one or leave the record out"
        raise invalid("messages", "no_answer", ..., rule, fix, where=name)
    if any(isinstance(p, int) for m in messages if m.role == "assistant" for p in m.parts):
        rule = "of an assistant must be text, and one has a picture"
        raise invalid("messages", "picture", ..., rule, "move it to the user's", where=name)
    return Record(name, messages, tuple(pictures), ways)


def _opened(name: str, slot: _Slot, number: int, folder: Path) -> EncodedImage:
    if slot.value is None:
        rule = f"of type {slot.kind} must have a value"
        fix = f"give {slot.kind}, path or url, or {slot.kind}s next to the messages"
        raise invalid("content", "no_value", dict(slot.part), rule, fix, where=name)
    if slot.kind == "image":
        found = picture_of(f"{name}, picture {number}", slot.value, folder)
        return replace(found, caps=_caps(found.name, slot.part))
    video = video_of(f"{name}, video {number}", slot.value, folder)
    for key in Caps._fields:
        if (value := slot.part.get(key)) is not None:
            rule = "is of an image, and a video has none"
            fix = f"set resolution.budget.{key} of the source, which bounds each frame"
            raise invalid(key, "video", value, rule, fix, where=video.name)
    return video


def _caps(name: str, part: Mapping[str, Any]) -> Caps:
    """Those of a part of type image; a table that all parts share may give null."""
    for key in Caps._fields:
        value = part.get(key)
        if value is not None and not is_size(value, 2**40):
            rule = f"must be a whole number from 1 to {2**40}"
            raise invalid(key, "size", value, rule, "correct it, or leave it out", where=name)
    return Caps(*(part.get(key) for key in Caps._fields))
