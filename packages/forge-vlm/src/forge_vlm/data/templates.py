"""How a conversation is written: pieces of text, special tokens and pictures, and which of them are learnt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from forge_vlm.data.records import DOCUMENT, Message, Record

__all__ = ["END_TOKENS", "JINJA", "TEMPLATES", "Piece", "Template", "pieces_of"]

# Of LLaVA-1.5, as its model cards give it.
_VICUNA_SYSTEM = (
    "A chat between a curious human and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the human's questions."
)


class Piece(NamedTuple):
    """Text of the record, a special token by name, the end token, the place of the record's picture number `picture`, or
    text of a template that may hold special tokens.

    `answer` numbers the messages that are learnt from 0; it is -1 where nothing is.
    """

    text: str
    kind: Literal["text", "special", "end", "image", "template"] = "text"
    answer: int = -1
    picture: int = -1


Template = Callable[[Record], Iterator[Piece]]


def pieces_of(record: Record, template: Template) -> Iterator[Piece]:
    """The pieces of a conversation in order; a document is its text and pictures under any template."""
    if record.messages[0].role == DOCUMENT:
        yield from _parts(record.messages[0], 0)
        yield Piece("", "end", 0)
    else:
        yield from template(record)


def _parts(message: Message, answer: int = -1) -> Iterator[Piece]:
    for part in message.parts:
        yield Piece(part, "text", answer) if isinstance(part, str) else Piece("", "image", -1, part)


def _plain(record: Record) -> Iterator[Piece]:
    """Pictures and answers alone (stage 1 of LLaVA): questions are left out."""
    number = 0
    for message in record.messages:
        if message.role == "assistant":
            yield from _parts(message, number)
            yield Piece("", "end", number)
            number += 1
        else:
            yield from (piece for piece in _parts(message) if piece.kind == "image")


def _vicuna(record: Record) -> Iterator[Piece]:
    """`SYSTEM USER: ... ASSISTANT: ...` and an end behind each answer, which the next `USER: ` follows (LLaVA-1.5)."""
    number, between = 0, " "
    if record.messages[0].role != "system":
        yield Piece(_VICUNA_SYSTEM)
    for message in record.messages:
        if message.role == "system":
            yield from _parts(message)
        elif message.role == "user":
            yield Piece(f"{between}USER: ")
            yield from _parts(message)
            between = " "
        else:
            yield Piece(f"{between}ASSISTANT:")
            # the blank belongs to the answer: tokenizers join it to the first word
            yield Piece(" ", "text", number)
            yield from _parts(message, number)
            yield Piece("", "end", number)
            number, between = number + 1, ""


def _chatml(record: Record) -> Iterator[Piece]:
    """`<|im_start|>role`, a line, the text, the end token, a line (Qwen)."""
    number = 0
    for message in record.messages:
        learnt = number if message.role == "assistant" else -1
        yield Piece("<|im_start|>", "special")
        yield Piece(f"{message.role}\n")
        yield from _parts(message, learnt)
        yield Piece("", "end", learnt)
        yield Piece("\n")
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
