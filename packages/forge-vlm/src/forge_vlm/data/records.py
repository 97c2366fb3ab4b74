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
from forge_vlm.data.errors import InvalidSample

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

    def read(self) -> bytes:
        """Its bytes, still encoded; InvalidSample where the file cannot be read."""
        if isinstance(self.content, bytes):
            return self.content
        try:
            if isinstance(self.content, Path):
                return self.content.read_bytes()
            path, offset, size = self.content
            with path.open("rb") as file:
                file.seek(offset)
                found = file.read(size)
        except OSError as error:
            raise InvalidSample(
                f"{self.name} cannot be read ({error.strerror}); restore it"
            ) from error
        if len(found) != size:
            raise InvalidSample(f"{path} has become shorter; restore it")
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
        raise InvalidSample(
            f"{name}: branches must be a list of lists, each of what one branch says; correct it"
        )
    return found


def _messages(
    name: str, messages: Any, folder: Path, pictures: list[Picture]
) -> tuple[Message, ...]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidSample(f"{name}: messages must be a list with one message or more; correct it")
    found = []
    for message in messages:
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ROLES:
            raise InvalidSample(
                f"{name}: role {role!r:.80} must be one of {', '.join(ROLES)}; correct it"
            )
        content = message.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, Sequence):
            raise InvalidSample(
                f"{name}: content of a message must be text or a list of parts; correct it"
            )
        parts = tuple(_part(name, part, folder, pictures) for part in parts)
        found.append(Message(role, parts, _weight(name, message.get("weight"))))
    return tuple(found)


def _weight(name: str, given: Any) -> float:
    weight = 1.0 if given is None else given
    if not is_finite(weight) or weight < 0:
        raise InvalidSample(
            f"{name}: weight {given!r:.40} of a message must be a finite number of at least 0; use 1"
        )
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
            raise InvalidSample(
                f"{video.name}: {capped} {part[capped]!r:.40} is of an image, and a video has none; set resolution.budget.{capped} "
                "of the source, which bounds each frame"
            )
        pictures.append(video)
        return len(pictures) - 1
    raise InvalidSample(
        f"{name}: a part of type {kind!r:.80} must be text, image or video, with a value of that name; correct it"
    )


def _caps(name: str, part: Mapping[str, Any]) -> Caps:
    """Those of a part of type image; a table that all parts share may give null."""
    for key in Caps._fields:
        value = part.get(key)
        if value is not None and not is_size(value, 2**40):
            raise InvalidSample(
                f"{name}: {key} {value!r:.40} must be a whole number from 1 to {2**40}; correct it, or leave it out"
            )
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
        raise InvalidSample(
            f"{name}: {used} marks {IMAGE} must be those of {len(pictures)} pictures; give a mark for each"
        )
    return _checked(Record(name, tuple(messages), pictures, tuple(branches)), asks)


def _turns(name: str, turns: Any, used: int, mark: str) -> tuple[list[Message], int]:
    """Messages, and how many pictures are named up to their end."""
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        raise InvalidSample(
            f"{name}: conversations must be a list with one turn or more; correct it"
        )
    messages = []
    for turn in turns:
        said = turn if isinstance(turn, Mapping) else {}
        role, text = _LLAVA_ROLES.get(str(said.get("from"))), said.get("value")
        if role is None or not isinstance(text, str):
            raise InvalidSample(
                f"{name}: a turn must have 'from' human, gpt or system, and a text 'value'; correct it"
            )
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
        raise InvalidSample(f"{name}: question and answer must be texts; give both")
    if not isinstance(options, list) or not all(isinstance(o, str) for o in options):
        raise InvalidSample(f"{name}: options must be a list of texts; correct them")
    said = str(answer)
    if options:
        letters = [chr(ord("A") + i) for i in range(len(options))]
        question = "\n".join([question, *(f"{a}. {o}" for a, o in zip(letters, options))])
        by_name = dict(zip(options, letters)) | dict(zip(map(str, range(len(letters))), letters))
        said = said if said in letters else by_name.get(said, "")
        if not said:
            raise InvalidSample(
                f"{name}: answer {answer!r:.80} must be one of the options, its letter or its number; correct it"
            )
    messages = (Message("user", (*range(len(videos)), question)), Message("assistant", (said,)))
    return Record(name, messages, tuple(videos))


def interleaved(name: str, texts: Any, pictures: Sequence[Picture]) -> Record:
    """A document of texts with a picture at each None among them; all of its text is learnt."""
    if not isinstance(texts, list) or not any(isinstance(t, str) and t for t in texts):
        raise InvalidSample(f"{name}: texts must be a list with a text in it; correct it")
    places = iter(range(len(texts)))
    parts = tuple(next(places) if text is None else text for text in texts)
    marks = sum(isinstance(part, int) for part in parts)
    if marks != len(pictures) or not all(isinstance(part, str | int) for part in parts):
        raise InvalidSample(
            f"{name}: texts must hold text, and null for each of {len(pictures)} pictures, and have {marks}; correct them"
        )
    return Record(name, (Message(DOCUMENT, parts),), tuple(pictures))


def captioned(name: str, caption: Any, pictures: Sequence[Picture], *more: Any) -> Record:
    """A picture, and the text that says what is on it; with `more` texts each is a branch."""
    if len(pictures) != 1:
        raise InvalidSample(
            f"{name}: a caption must be that of one picture, and there are {len(pictures)}; give messages in place of it"
        )
    if not all(isinstance(text, str) and text for text in (caption, *more)):
        raise InvalidSample(f"{name}: the caption must be a text; correct it")
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
            raise InvalidSample(f"{name}: its data URI must be base64; correct it") from error
    if not isinstance(given, str) or not given or "\0" in given:
        raise InvalidSample(f"{name}: {given!r:.80} must be a path or a data URI; correct it")
    path = (folder / given).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise InvalidSample(
            f"{name}: path {given!r:.80} must lie below {folder}; move the file there"
        )
    return Picture(f"{name} ({given})", path)


def video_of(name: str, given: Any, folder: Path) -> Video:
    """A video of whatever a picture is given by."""
    found = picture_of(name, given, folder)
    return Video(found.name, found.content)


def _checked(record: Record, asks: bool) -> Record:
    if any(isinstance(p, int) for branch in record.branches for m in branch for p in m.parts):
        raise InvalidSample(
            f"{record.name}: a picture must stand in what branches share, and a branch has one; move it to the messages before"
        )
    ends = record.branches or (record.messages,)
    if not asks and not all(any(m.role == "assistant" for m in messages) for messages in ends):
        raise InvalidSample(
            f"{record.name}: there is no assistant's message to learn; give one or leave the record out"
        )
    if any(isinstance(p, int) for m in record.messages if m.role == "assistant" for p in m.parts):
        raise InvalidSample(
            f"{record.name}: an assistant's message must be text, and one has a picture; move it to the user's"
        )
    return record
