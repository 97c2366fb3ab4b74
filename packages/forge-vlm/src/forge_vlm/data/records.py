"""A record of any format as messages whose parts are text and pictures."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from forge_vlm._config import is_finite, is_size
from forge_vlm._shared.paths import read_regular
from forge_vlm.data.errors import InvalidSample, invalid

__all__ = [
    "Caps",
    "Message",
    "Picture",
    "Record",
    "Records",
    "Span",
    "Video",
    "asked",
    "captioned",
    "from_chat",
    "from_llava",
    "interleaved",
]

ROLES = ("system", "user", "assistant")
DOCUMENT = "document"  # role of the only message of a text with pictures that nobody says
LEARNT = ("assistant", DOCUMENT)
_LLAVA_ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
MOST_BYTES, MOST_PIXELS = 1 << 28, 100_000_000  # of a picture, where options do not say
IMAGE, VIDEO = "<image>", "<video>"  # the marks of LLaVA's files


class Caps(NamedTuple):
    """Bounds of one picture's pixels, in place of those of resolution.budget; None: those."""

    min_pixels: int | None = None
    max_pixels: int | None = None


NO_CAPS = Caps()


class Span(NamedTuple):
    """Bytes of a file."""

    path: Path
    offset: int
    size: int


@dataclass(frozen=True)
class Picture:
    """A picture that is yet to be read: encoded bytes, or where they are. `name` is for messages."""

    name: str
    content: bytes | Path | Span
    caps: Caps = field(default=NO_CAPS, kw_only=True)

    @property
    def size(self) -> tuple[int, int] | None:
        """Height and width where they are known without reading it."""
        return None

    def read(self, most: int = MOST_BYTES) -> bytes:
        """Its bytes, still encoded; InvalidSample where the file cannot be read, or has more than `most` of them."""
        if isinstance(self.content, bytes):
            return self.content
        try:
            if isinstance(self.content, Path):
                return read_regular(self.content, most, InvalidSample)
            path, offset, size = self.content
            if size > most:
                rule, fix = (
                    f"bytes must be at most {most}",
                    "leave it out, or raise max_image_bytes",
                )
                raise invalid("", "length", size, rule, fix, where=self.name)
            with path.open("rb") as file:
                file.seek(offset)
                found = file.read(size)
        except InvalidSample as error:
            raise InvalidSample(error.problems, self.name) from None
        except OSError as error:
            rule = f"cannot be read ({error.strerror})"
            raise invalid("", "unreadable", ..., rule, "restore it", where=self.name) from error
        if len(found) != size:
            raise invalid("", "truncated", ..., "has become shorter", "restore it", where=path)
        return found

    def release(self) -> None:
        """Let go of what reading it has kept."""


class Video(Picture):
    """A clip that is yet to be opened; its frames take its place among the pictures (`forge_vlm.data.video`)."""


@dataclass(frozen=True)
class Message:
    """What one side says: text, and pictures where they stand in it, by their number in the record. `weight` is that of
    its labels."""

    role: str
    parts: tuple[str | int, ...]
    weight: float = 1.0


@dataclass(frozen=True)
class Record:
    """A conversation, and its pictures in the order in which it names them. `branches` are several ways in which it goes
    on, of which none knows of another."""

    name: str
    messages: tuple[Message, ...]
    pictures: tuple[Picture, ...] = ()
    branches: tuple[tuple[Message, ...], ...] = ()


class Records(Protocol):
    """An indexed set of records; reading one reads no pictures."""

    def __len__(self) -> int:
        """Number of records."""
        ...

    def __getitem__(self, index: int) -> Record:
        """A record; InvalidSample with its name where it is none."""
        ...

    def fingerprint(self) -> str:
        """A digest of the content, pictures in files of their own by size and time of change alone."""
        ...


def from_chat(name: str, value: Any, folder: Path, asks: bool = False) -> Record:
    """A record of `{"messages": [{"role": ..., "content": text or parts}]}`.

    A part is `{"type": "text", "text": ...}`, or `{"type": "image", "image": ...}` (also "image_url", "video", "video_url")
    of a path below `folder` or a data URI, or `"base64"` in place of "image"; beside an image `min_pixels` and `max_pixels`
    bound its own pixels (resolution "budget"). A message may have a `weight`. Text is text: a mark of pictures in it means nothing. One that only `asks` may be without an answer. `"branches": [[message, ...], ...]`
    are several ways to go on behind the messages.
    """
    given = value if isinstance(value, Mapping) else {}
    pictures: list[Picture] = []
    messages = _messages(name, given.get("messages"), folder, pictures)
    branches = [_messages(name, branch, folder, pictures) for branch in _branches(name, given)]
    return _checked(Record(name, messages, tuple(pictures), tuple(branches)), asks)


def _branches(name: str, given: Mapping[str, Any]) -> Sequence[Any]:
    found = given.get("branches") or ()
    if not isinstance(found, Sequence) or isinstance(found, str):
        rule = "must be a list of lists, each of what one branch says"
        raise invalid("branches", "type", found, rule, "correct it", where=name)
    return found


def _messages(
    name: str, messages: Any, folder: Path, pictures: list[Picture]
) -> tuple[Message, ...]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        rule = "must be a list with one message or more"
        raise invalid("messages", "type", messages, rule, "correct it", where=name)
    found = []
    for message in messages:
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ROLES:
            rule = f"must be one of {', '.join(ROLES)}"
            raise invalid("role", "unknown", role, rule, "correct it", where=name)
        content = message.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, Sequence):
            rule = "must be text or a list of parts"
            raise invalid("content", "type", content, rule, "correct it", where=name)
        parts = tuple(_part(name, part, folder, pictures) for part in parts)
        found.append(Message(role, parts, _weight(name, message.get("weight"))))
    return tuple(found)


def _weight(name: str, given: Any) -> float:
    weight = 1.0 if given is None else given
    if not is_finite(weight) or weight < 0:
        rule = "of a message must be a finite number of at least 0"
        raise invalid("weight", "range", given, rule, "use 1", where=name)
    return float(weight)


def _part(name: str, part: Any, folder: Path, pictures: list[Picture]) -> str | int:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    if kind in ("image", "image_url"):
        given = part.get(kind)
        if given is None and isinstance(part.get("base64"), str):
            given = f"data:;base64,{part['base64']}"
        given = given.get("url") if isinstance(given, Mapping) and "url" in given else given
        found = picture_of(f"{name}, picture {len(pictures)}", given, folder)
        pictures.append(replace(found, caps=_caps(found.name, part)))
        return len(pictures) - 1
    if kind in ("video", "video_url"):
        given = part.get(kind)
        given = given.get("url") if isinstance(given, Mapping) and "url" in given else given
        video = video_of(f"{name}, video {len(pictures)}", given, folder)
        capped = next((key for key in Caps._fields if part.get(key) is not None), None)
        if capped:
            rule, value = "is of an image, and a video has none", part[capped]
            fix = f"set resolution.budget.{capped} of the source, which bounds each frame"
            raise invalid(capped, "video", value, rule, fix, where=video.name)
        pictures.append(video)
        return len(pictures) - 1
    rule = "of a part must be text, image or video, with a value of that name"
    raise invalid("type", "unknown", kind, rule, "correct it", where=name)


def _caps(name: str, part: Mapping[str, Any]) -> Caps:
    """Those of a part of type image; a table that all parts share may give null."""
    for key in Caps._fields:
        value = part.get(key)
        if value is not None and not is_size(value, 2**40):
            rule = f"must be a whole number from 1 to {2**40}"
            raise invalid(key, "size", value, rule, "correct it, or leave it out", where=name)
    return Caps(*(part.get(key) for key in Caps._fields))


def from_llava(name: str, value: Any, folder: Path, asks: bool = False) -> Record:
    """A record of LLaVA's JSON: `image` is a path or a list of them, `<image>` in `conversations` their places; or `video`,
    whose place is `<video>` or `<image>`.

    Pictures without a mark stand before the first text. One that only `asks` may be without an answer. `"branches":
    [[turn, ...], ...]` are several ways to go on. Raises InvalidSample for another number of marks.
    """
    named = value if isinstance(value, Mapping) else {}
    pictures = tuple(_media_of(name, named, folder))
    mark = VIDEO if "video" in named else IMAGE  # of a video, which may be written either way
    messages, used = _turns(name, named.get("conversations"), 0, mark)
    branches = []
    for branch in _branches(name, named):
        own, used = _turns(name, branch, used, mark)
        branches.append(tuple(own))
    if used == 0 and pictures:
        first = next((i for i, m in enumerate(messages) if m.role == "user"), 0)
        begun = messages[first]
        messages[first] = Message(begun.role, (*range(len(pictures)), *begun.parts))
        used = len(pictures)
    if used != len(pictures):
        rule = f"marks {IMAGE} must be as many as the images, {len(pictures)}"
        raise invalid("conversations", "number", used, rule, "give a mark for each", where=name)
    return _checked(Record(name, tuple(messages), pictures, tuple(branches)), asks)


def _turns(name: str, turns: Any, used: int, mark: str) -> tuple[list[Message], int]:
    """Messages, and how many pictures are named up to their end."""
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        rule = "must be a list with one turn or more"
        raise invalid("conversations", "type", turns, rule, "correct it", where=name)
    messages = []
    for turn in turns:
        said = turn if isinstance(turn, Mapping) else {}
        role, text = _LLAVA_ROLES.get(str(said.get("from"))), said.get("value")
        if role is None or not isinstance(text, str):
            rule = "must have 'from' human, gpt or system, and a text 'value'"
            raise invalid("conversations", "turn", turn, rule, "correct it", where=name)
        pieces = text.replace(mark, IMAGE).split(IMAGE) if role != "assistant" else [text]
        parts: list[str | int] = [pieces[0]]
        for piece in pieces[1:]:
            parts += [used, piece]
            used += 1
        messages.append(Message(role, tuple(p for p in parts if p != "")))
    return messages, used


def _media_of(name: str, value: Mapping[str, Any], folder: Path) -> Iterator[Picture]:
    for key, make in (("image", picture_of), ("video", video_of)):
        given = value.get(key)
        paths = [] if given is None else given if isinstance(given, list) else [given]
        for i, path in enumerate(paths):
            yield make(f"{name}, {'picture' if key == 'image' else key} {i}", path, folder)


def asked(name: str, row: Mapping[str, Any], videos: Sequence[Video]) -> Record:
    """A question about a video: `question`, `answer`, and for a choice `options` (a list, or JSON of one) or columns a0, a1, ....

    Options are lettered from A below the question, and the letter is the answer, which may be given as a letter, as the
    number of an option from 0, or as its text.
    """
    question, answer = row.get("question"), row.get("answer")
    given = row.get("options")
    try:
        options = json.loads(given) if isinstance(given, str) and given else given or []
    except ValueError:
        options = given  # no list
    options = options or [row[f"a{i}"] for i in range(26) if row.get(f"a{i}") not in (None, "")]
    if not isinstance(question, str) or not question or answer is None or answer == "":
        rule = "(with its answer) must be two texts"
        raise invalid("question", "type", (question, answer), rule, "give both", where=name)
    if not isinstance(options, list) or not all(isinstance(o, str) for o in options):
        rule = "must be a list of texts"
        raise invalid("options", "type", options, rule, "correct them", where=name)
    said = str(answer)
    if options:
        letters = [chr(ord("A") + i) for i in range(len(options))]
        question = "\n".join([question, *(f"{a}. {o}" for a, o in zip(letters, options))])
        by_name = dict(zip(options, letters)) | dict(zip(map(str, range(len(letters))), letters))
        said = said if said in letters else by_name.get(said, "")
        if not said:
            rule = "must be one of the options, its letter or its number"
            raise invalid("answer", "unknown", answer, rule, "correct it", where=name)
    messages = (Message("user", (*range(len(videos)), question)), Message("assistant", (said,)))
    return Record(name, messages, tuple(videos))


def interleaved(name: str, texts: Any, pictures: Sequence[Picture]) -> Record:
    """A document of texts with a picture at each None among them; all of its text is learnt."""
    if not isinstance(texts, list) or not any(isinstance(t, str) and t for t in texts):
        rule = "must be a list with a text in it"
        raise invalid("texts", "type", texts, rule, "correct it", where=name)
    places = iter(range(len(texts)))
    parts = tuple(next(places) if text is None else text for text in texts)
    marks = sum(isinstance(part, int) for part in parts)
    if marks != len(pictures) or not all(isinstance(part, str | int) for part in parts):
        rule = (
            f"places with null must be as many as the images, {len(pictures)}, and all others text"
        )
        raise invalid("texts", "number", marks, rule, "correct them", where=name)
    return Record(name, (Message(DOCUMENT, parts),), tuple(pictures))


def captioned(name: str, caption: Any, pictures: Sequence[Picture], *more: Any) -> Record:
    """A picture, and the text that says what is on it; with `more` texts each is a branch."""
    if len(pictures) != 1:
        rule, fix = "images must be 1 with a caption", "give messages in place of it"
        raise invalid("caption", "number", len(pictures), rule, fix, where=name)
    if not all(isinstance(text, str) and text for text in (caption, *more)):
        raise invalid("caption", "type", caption, "must be a text", "correct it", where=name)
    asked, said = (
        Message("user", (0,)),
        [Message("assistant", (text,)) for text in (caption, *more)],
    )
    if more:
        return Record(name, (asked,), tuple(pictures), tuple((answer,) for answer in said))
    return Record(name, (asked, said[0]), tuple(pictures))


def picture_of(name: str, given: Any, folder: Path) -> Picture:
    """A picture of a path below `folder`, a data URI, base64, bytes, or the {"bytes", "path"} of `datasets`."""
    if isinstance(given, Mapping):
        content = given.get("bytes")
        given = content if isinstance(content, bytes | Span) else given.get("path")
    if isinstance(given, bytes | Span):
        return Picture(name, given)
    if isinstance(given, str) and given.startswith("data:"):
        given = given.partition(",")[2]
        try:
            return Picture(name, base64.b64decode(given, validate=True))
        except binascii.Error as error:
            rule = "must be base64 in a data URI"
            raise invalid("path", "base64", ..., rule, "correct it", where=name) from error
    if not isinstance(given, str) or not given or "\0" in given:
        rule = "must be a path or a data URI"
        raise invalid("path", "type", given, rule, "correct it", where=name)
    path = (folder / given).resolve()
    if not path.is_relative_to(folder.resolve()):
        fix = "move the file there"
        raise invalid("path", "outside", given, f"must lie below {folder}", fix, where=name)
    return Picture(f"{name} ({given})", path)


def video_of(name: str, given: Any, folder: Path) -> Video:
    """A video of whatever a picture is given by."""
    found = picture_of(name, given, folder)
    return Video(found.name, found.content)


def _checked(record: Record, asks: bool) -> Record:
    if any(isinstance(p, int) for branch in record.branches for m in branch for p in m.parts):
        rule = "must not hold a picture, and one has it"
        fix = "move it to the messages before"
        raise invalid("branches", "picture", ..., rule, fix, where=record.name)
    ends = record.branches or (record.messages,)
    if not asks and not all(any(m.role == "assistant" for m in messages) for messages in ends):
        rule = "must hold an assistant's message to learn"
        fix = "give one or leave the record out"
        raise invalid("messages", "no_answer", ..., rule, fix, where=record.name)
    if any(isinstance(p, int) for m in record.messages if m.role == "assistant" for p in m.parts):
        rule = "of an assistant must be text, and one has a picture"
        raise invalid("messages", "picture", ..., rule, "move it to the user's", where=record.name)
    return record
