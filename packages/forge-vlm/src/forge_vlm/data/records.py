"""A record of any format as messages whose parts are text and images."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from forge_vlm._renamed import renamed
from forge_vlm._shared.paths import read_regular
from forge_vlm.data.files import InvalidSample, invalid

__all__ = [
    "Caps",
    "EncodedImage",
    "Message",
    "Record",
    "Records",
    "Span",
    "Video",
    "asked",
    "captioned",
    "interleaved",
]

ROLES = ("system", "user", "assistant")
DOCUMENT = "document"  # role of the only message of a text with images without a speaker
TRAINED_ROLES = ("assistant", DOCUMENT)
_URL = re.compile(r"/[A-Za-z][A-Za-z0-9+.-]+:/")  # in a path, where two slashes are one
MOST_BYTES, MOST_PIXELS = 1 << 28, 100_000_000  # of an image, where options do not say


class Caps(NamedTuple):
    """Bounds of one image's pixels, in place of those of resolution.budget; None: those."""

    min_pixels: int | None = None
    max_pixels: int | None = None


NO_CAPS = Caps()


class Span(NamedTuple):
    """Bytes of a file."""

    path: Path
    offset: int
    size: int


@dataclass(frozen=True)
class EncodedImage:
    """An image that is yet to be read: encoded bytes, or where they are. `name` is for messages."""

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
            where = self.content[0] if isinstance(self.content, Span) else self.content
            raise unreadable(self.name, where, error) from error

        if len(found) != size:
            raise invalid("", "truncated", ..., "has become shorter", "restore it", where=path)
        return found

    def release(self) -> None:
        """Let go of what reading it has kept."""


def unreadable(name: str, path: Path, error: OSError) -> Any:
    """The error of a file that cannot be opened; `corrupt` leaves it out, and a URL that a record gives as its path."""
    if _URL.search(str(path)):
        rule, fix = "is a URL, and nothing is downloaded", "download it and give its path"
        return invalid("", "url", ..., rule, fix, where=name)
    rule = f"cannot be read ({error.strerror}: {path})"
    return invalid("", "unreadable", ..., rule, "restore it", where=name)


class Video(EncodedImage):
    """A clip that is yet to be opened; its frames take its place among the images (`forge_vlm.data.video`)."""


@dataclass(frozen=True)
class Message:
    """What one side says: text, and images where they stand in it, by their number in the record. `weight` is that of
    its labels."""

    role: str
    parts: tuple[str | int, ...]
    weight: float = 1.0


@dataclass(frozen=True)
class Record:
    """A conversation, and its images in the order in which it names them. `branches` are several ways in which it goes
    on, of which none knows of another."""

    name: str
    messages: tuple[Message, ...]
    pictures: tuple[EncodedImage, ...] = ()
    branches: tuple[tuple[Message, ...], ...] = ()


class Records(Protocol):
    """An indexed set of records; reading one reads no images."""

    def __len__(self) -> int:
        """Number of records."""
        ...

    def __getitem__(self, index: int) -> Record:
        """A record; InvalidSample with its name if it is invalid."""
        ...

    def fingerprint(self, cache: str | None = None) -> str:
        """A digest of the content of the files of records; of large ones it is kept in `cache`."""
        ...


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


def interleaved(name: str, texts: Any, pictures: Sequence[EncodedImage]) -> Record:
    """A document of texts with an image at each None among them; all of its text is trained."""
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


def captioned(name: str, caption: Any, pictures: Sequence[EncodedImage], *more: Any) -> Record:
    """An image, and the text that says what is on it; with `more` texts each is a branch."""
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


def picture_of(name: str, given: Any, folder: Path) -> EncodedImage:
    """An image of a path below `folder`, a data URI, base64, bytes, or the {"bytes", "path"} of `datasets`.

    Links are followed: LLaVA's layout and the cache of Hugging Face are made of them."""
    if isinstance(given, Mapping):
        content = given.get("bytes")
        given = (
            content if isinstance(content, bytes | Span) else given.get("path") or given.get("url")
        )

    if isinstance(given, bytes | Span):
        return EncodedImage(name, given)
    if isinstance(given, str) and given.startswith("data:"):
        given = given.partition(",")[2]
        try:
            return EncodedImage(name, base64.b64decode(given, validate=True))
        except binascii.Error as error:
            rule = "must be base64 in a data URI"
            raise invalid("path", "base64", ..., rule, "correct it", where=name) from error

    if not isinstance(given, str) or not given or "\0" in given:
        rule = "must be a path or a data URI"
        raise invalid("path", "type", given, rule, "correct it", where=name)
    path = (folder / given).resolve()
    if not path.is_relative_to(folder.resolve()):
        # by its name, as ".." after a link leads out of the folder
        path = folder.absolute() / os.path.normpath(given)
        if ".." in Path(os.path.normpath(given)).parts or not path.is_relative_to(
            folder.absolute()
        ):
            rule, fix = f"must lie below {folder}", "move the file there, or set images"
            raise invalid("path", "outside", given, rule, fix, where=name)

    return EncodedImage(f"{name} ({given})", path)


def video_of(name: str, given: Any, folder: Path) -> Video:
    """A video of whatever an image is given by."""
    found = picture_of(name, given, folder)
    return Video(found.name, found.content)


__getattr__ = renamed(__name__)
