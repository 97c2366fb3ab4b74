"""Chat templates: a conversation as text, special tokens and images, with the answer that each belongs to."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from forge_vlm._renamed import renamed
from forge_vlm._shared.paths import user_path
from forge_vlm._shared.problems import ProblemError
from forge_vlm.data.files import InvalidSample, invalid
from forge_vlm.data.records import DOCUMENT, Message, Record

__all__ = [
    "END_TOKENS",
    "JINJA",
    "TEMPLATES",
    "ChatSegment",
    "Template",
    "TokenizerTemplate",
    "segments_of",
]

# Of LLaVA-1.5, as its model cards give it.
_VICUNA_SYSTEM = (
    "A chat between a curious human and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the human's questions."
)


class ChatSegment(NamedTuple):
    """Text of the record, a special token by name, the end token, the place of the record's image number `picture`, or
    text of a template that may hold special tokens.

    `answer` numbers the messages that are trained from 0; it is -1 where nothing is.
    """

    text: str
    kind: Literal["text", "special", "end", "image", "template"] = "text"
    answer: int = -1
    picture: int = -1


Template = Callable[[Record], Iterator[ChatSegment]]


def segments_of(record: Record, template: Template) -> Iterator[ChatSegment]:
    """The segments of a conversation in order; a document is its text and images under any template."""
    if record.messages[0].role == DOCUMENT:
        yield from _parts(record.messages[0], 0)
        yield ChatSegment("", "end", 0)
    else:
        yield from template(record)


def _parts(message: Message, answer: int = -1) -> Iterator[ChatSegment]:
    for part in message.parts:
        yield (
            ChatSegment(part, "text", answer)
            if isinstance(part, str)
            else ChatSegment("", "image", -1, part)
        )


def _plain(record: Record) -> Iterator[ChatSegment]:
    """Images and answers only (stage 1 of LLaVA): questions are left out."""
    number = 0
    for message in record.messages:
        if message.role == "assistant":
            yield from _parts(message, number)
            yield ChatSegment("", "end", number)
            number += 1
        else:
            yield from (piece for piece in _parts(message) if piece.kind == "image")


def _vicuna(record: Record) -> Iterator[ChatSegment]:
    """`SYSTEM USER: ... ASSISTANT: ...` and an end after each answer, which the next `USER: ` follows (LLaVA-1.5)."""
    number, between = 0, " "
    if record.messages[0].role != "system":
        yield ChatSegment(_VICUNA_SYSTEM)
    for message in record.messages:
        if message.role == "system":
            yield from _parts(message)
        elif message.role == "user":
            yield ChatSegment(f"{between}USER: ")
            yield from _parts(message)
            between = " "
        else:
            yield ChatSegment(f"{between}ASSISTANT:")
            # the blank belongs to the answer: tokenizers concatenate it to the first word
            yield ChatSegment(" ", "text", number)
            yield from _parts(message, number)
            yield ChatSegment("", "end", number)
            number, between = number + 1, ""


def _chatml(record: Record) -> Iterator[ChatSegment]:
    """`<|im_start|>role`, a line, the text, the end token, a line (Qwen)."""
    number = 0
    for message in record.messages:
        answer = number if message.role == "assistant" else -1
        yield ChatSegment("<|im_start|>", "special")
        yield ChatSegment(f"{message.role}\n")
        yield from _parts(message, answer)
        yield ChatSegment("", "end", answer)
        yield ChatSegment("\n")
        number += message.role == "assistant"


TEMPLATES: dict[str, Template] = {
    "plain": _plain,
    "vicuna": _vicuna,
    "chatml": _chatml,
}
#: What ends an answer under a template, unless a source names another token; under others the end of the tokenizer does.
END_TOKENS = {"chatml": "<|im_end|>"}
_CONTENT = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}{{ <<image>> }}{% endif %}{% endfor %}{% endif %}"
)
#: The templates for transformers, with marks in place of eos, bos and image; "" for plain, which leaves questions out.
JINJA = {
    "plain": "",
    "vicuna": (
        "{{ <<bos>> }}{% if messages[0].role != 'system' %}" + _VICUNA_SYSTEM + "{% endif %}"
        "{% set between = namespace(text=' ') %}{% for m in messages %}"
        "{% if m.role == 'user' %}{{ between.text + 'USER: ' }}{% set between.text = ' ' %}"
        "{% elif m.role == 'assistant' %}{{ between.text + 'ASSISTANT: ' }}{% endif %}"
        + _CONTENT
        + "{% if m.role == 'assistant' %}{{ <<eos>> }}{% set between.text = '' %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ between.text + 'ASSISTANT:' }}{% endif %}"
    ),
    "chatml": (
        "{{ <<bos>> }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
        + _CONTENT
        + "{{ <<eos>> + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
}
# of Unicode's private use: no tokenizer's text, so a template passes them on
_OPEN, _CLOSE = "\ue000", "\ue001"
_MARK = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")


class TokenizerTemplate:
    """What `apply_chat_template` of a tokenizer's folder makes of a conversation, as segments.

        template = TokenizerTemplate("SmolVLM-256M", eos=None, image="<image>")
        pieces = list(template(record))

    It is rendered with marks in place of texts, so a text is never taken for a part of the template. Answers are trained with
    the end token that the template puts after each: `eos`, or the special token found there, which may be the mark of the
    next role. Raises ValueError where transformers is not installed or the folder
    has no template; calls raise InvalidSample where the template does not take the conversation, or changes its text.
    """

    def __init__(self, folder: str, eos: str | None, image: str) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError:
            rule, fix = f"of {folder} needs transformers", "pip install 'forge-vlm[transformers]'"
            value = "tokenizer"
            raise invalid("template", "requires", value, rule, fix, kind=ProblemError) from None

        folder = str(user_path(folder))
        if not (Path(folder) / "tokenizer.json").is_file():
            rule = "must be a folder with tokenizer.json for template 'tokenizer'"
            fix = "give that of the model"
            raise invalid("tokenizer", "not_found", folder, rule, fix, kind=ProblemError)

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if not self._tokenizer.chat_template:
            fix = "use template 'chatml', 'vicuna' or 'plain'"
            rule = "has no chat template"
            raise invalid("tokenizer", "no_template", folder, rule, fix, kind=ProblemError)

        self._end = self._end_of_answers()
        self.eos: str = eos or self._end or self._tokenizer.eos_token or ""
        self.image, self._warned = image, False
        content = json.dumps(self._tokenizer.chat_template, sort_keys=True)
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()

    def __call__(self, record: Record) -> Iterator[ChatSegment]:
        """The segments of a conversation in order."""
        texts = [part for m in record.messages for part in m.parts if isinstance(part, str)]
        marked = self._render(record, [f"{_OPEN}{i}{_CLOSE}" for i in range(len(texts))])
        template, numbers = _MARK.split(marked)[::2], [int(n) for n in _MARK.findall(marked)]
        if numbers != [*range(len(texts))]:
            rule = f"gives texts {numbers} of {len(texts)}, each of which must be there once and in order"
            raise invalid("template", "order", ..., rule, "use another template", where=record.name)
        texts = self._as_rendered(record, template, texts)
        answers = _answers(record.messages)
        pictures = iter([p for m in record.messages for p in m.parts if isinstance(p, int)])
        yield from self._own(record, template[0], pictures)
        for number, (text, answer, behind) in enumerate(zip(texts, answers, template[1:]), 1):
            last = number == len(texts)
            yield ChatSegment(text, "text", answer[0])
            if answer[1]:  # the last text of its message
                # an end that is the mark of the next role is missing where no role follows
                if not behind and last and self.eos == self._end:
                    self._warn_of_no_end(record)
                    break
                if not behind.startswith(self.eos) or not self.eos:
                    rule = f"must begin what the template puts after an answer, {behind!r:.40}"
                    fix = "set eos to the token that ends an answer"
                    raise invalid("eos", "end", self.eos, rule, fix, where=record.name)
                yield ChatSegment(self.eos, "special", answer[0])
                behind = behind[len(self.eos) :]
            yield from self._own(record, behind, pictures)
        if next(pictures, None) is not None:
            rule = "must be what the template writes for each picture, and one is left out"
            fix = "set image to what it writes"
            raise invalid("image", "missing", self.image, rule, fix, where=record.name)

    def _end_of_answers(self) -> str:
        """The special token that the template writes after an answer, "" if it writes none there."""
        added = self._tokenizer.added_tokens_decoder.values()
        special = sorted((t.content for t in added if t.special), key=len, reverse=True)
        asked, answer = Message("user", ("",)), Message("assistant", ("",))
        for messages in ((asked, answer, asked, answer), (asked, answer)):
            marks = [f"{_OPEN}{i}{_CLOSE}" for i in range(len(messages))]
            try:
                text = self._render(Record("a short conversation", messages), marks)
            except InvalidSample:  # a template of one turn, or of another form
                continue
            behind = text.partition(marks[1])[2]
            return next((name for name in special if behind.startswith(name)), "")
        return ""

    def _warn_of_no_end(self, record: Record) -> None:
        if not self._warned:
            self._warned = True
            line = f"data: {record.name}: the template writes no end token after its last answer, so its end is not learned"
            print(line, "(printed once)", file=sys.stderr)

    def _own(self, record: Record, text: str, pictures: Iterator[int]) -> Iterator[ChatSegment]:
        """Text of the template, with images in it."""
        first, *rest = text.split(self.image)
        yield ChatSegment(first, "template")
        for part in rest:
            number = next(pictures, None)
            if number is None:
                rule = "is written by the template more often than there are pictures"
                fix = "set image to what it writes once for each"
                raise invalid("image", "too_many", self.image, rule, fix, where=record.name)
            yield ChatSegment("", "image", -1, number)
            yield ChatSegment(part, "template")

    def _as_rendered(self, record: Record, template: Sequence[str], texts: list[str]) -> list[str]:
        """The texts as the template writes them: some take blanks from their ends."""
        wanted = self._render(record, texts)
        for given in (texts, [text.strip() for text in texts]):
            joined = "".join(a + b for a, b in zip(template, [*given, ""]))
            if joined == wanted:
                return given
        rule = "changes the text of a message (some drop earlier reasoning), so that its tokens are not known"
        fix = "use another template"
        raise invalid("template", "changes_text", ..., rule, fix, where=record.name)

    def _render(self, record: Record, texts: Sequence[str]) -> str:
        left = iter(texts)
        messages = []
        for message in record.messages:
            parts = [
                {"type": "image"} if isinstance(part, int) else {"type": "text", "text": next(left)}
                for part in message.parts
            ]
            messages.append({"role": message.role, "content": parts})
        try:
            found = self._tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception as error:  # a template raises what it likes
            rule = f"does not take it ({error!s:.200})"
            fix = "correct the record, or use another template"
            raise invalid("template", "rejects", ..., rule, fix, where=record.name) from None
        return str(found)


def _answers(messages: Sequence[Message]) -> list[tuple[int, bool]]:
    """For each text its answer's number, -1 for none, and whether it ends one."""
    found, number = [], 0
    for message in messages:
        said = message.role == "assistant"
        texts = [part for part in message.parts if isinstance(part, str)]
        found += [(number if said else -1, said and i == len(texts) - 1) for i in range(len(texts))]
        number += said
    return found


__getattr__ = renamed(__name__)
