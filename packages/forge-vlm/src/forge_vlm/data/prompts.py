"""Questions with images as the tokens and media that a model goes on from.

L   tokens of a prompt        N   tiles of all prompts
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from forge_vlm._shared.problems import ProblemError, raise_problems
from forge_vlm._shared.record_keys import RecordKeys
from forge_vlm.data.files import InvalidSample, invalid
from forge_vlm.data.formats import open_records
from forge_vlm.data.options import problems, video_of_options
from forge_vlm.data.prepared import is_prepared, prepared_options
from forge_vlm.data.records import DOCUMENT, EncodedImage, Message, Record
from forge_vlm.data.sample import SampleEncoder, sample_of
from forge_vlm.data.source import options_of
from forge_vlm.data.templates import JINJA, ChatSegment
from forge_vlm.data.video import expanded
from forge_vlm.resolution import Layout

__all__ = ["Prompt", "Prompts"]

#: Options of a source that say how its files are read.
_OF_FILES = ("format", "streaming", "virtual_shards", "shuffle_window")
_ANSWER = "answer"  # stands where the model goes on, for templates that ask for a text


class Prompt(NamedTuple):
    """Tokens (L,) up to where an answer begins, with as many placeholders as images have tokens; the images in the order
    of their places, with their layouts; and the record's own last answer, None where it only asks."""

    name: str
    tokens: np.ndarray
    pictures: tuple[EncodedImage, ...]
    layouts: tuple[Layout, ...]
    answer: str | None


class Prompts:
    """What a source `VisionChatSource` of the same options would make of a conversation, up to its last answer.

        prompts = Prompts(resolution={"fixed": {"size": 224}}, tokens_per_tile=256)
        asked = [*prompts.read("questions.jsonl")]
        new = generate(model, [p.tokens for p in asked], 20, extras=prompts.media(asked), eos_id=prompts.end_ids)

    Options are those of `VisionChatSource`, of which those about rows (pack, weigh, corrupt, ...) mean nothing here. Raises
    ValueError for options, InvalidSample for records and images. `Prompts.of_source(path, **options)` takes those of a
    source of any kind. `end_ids` end an answer: the end token of the template, and any that a caller adds.
    """

    def __init__(self, **options: Any) -> None:
        given = options_of("", options)
        raise_problems("prompts", problems(given))
        reader = SampleEncoder(given)
        self.tokens, self.template, self.pictures = reader.tokens, reader.template, reader.pictures
        self.options, self.identity = given, reader.identity
        self._video = video_of_options(given["video"] or {})
        self.end_ids: tuple[int, ...] = (self.tokens.eos_id,)
        self._keys = RecordKeys(given["ignore_keys"], given["strict"], InvalidSample)

    @classmethod
    def of_source(cls, path: str | Path, **options: Any) -> Prompts:
        """What `open_source` of a path and its options makes of a conversation, up to its last answer.

        A prepared folder has its own options; the format of files and streaming mean nothing here. Raises ValueError also for a tokenizer
        or chat template that is no longer the one of the folder.
        """
        given = {key: value for key, value in options.items() if key not in _OF_FILES}
        if not is_prepared(path):
            return cls(**given)
        given, digests = prepared_options(path, given)
        prompts = cls(**given)
        for key, digest in digests.items():
            if prompts.identity.get(key) != digest:
                rule, fix = f"is not the one with which {path} was prepared", "restore it"
                raise invalid(key, "mismatch", given["tokenizer"], rule, fix, kind=ProblemError)
        return prompts

    def jinja(self) -> str | None:
        """The template as jinja, for a folder of transformers; None for the tokenizer's own, "" for one that leaves
        questions out."""
        spec, template = self.tokens.spec or {}, JINJA.get(self.options["template"])
        values = {
            "eos": spec.get("eos", ""),
            "bos": "".join(self.tokens.begin),
            "image": self.tokens.image,
        }
        for key, value in values.items():
            template = template and template.replace(f"<<{key}>>", json.dumps(value))
        return template

    def read(self, path: str | Path, format: str = "chat", most: int | None = None) -> list[Prompt]:
        """The prompts of a file's records in order, of the first `most` of them."""
        records = open_records(format, path, True, self._keys, self.options["images"])
        count = len(records) if most is None else min(most, len(records))
        return [self(records[number]) for number in range(count)]

    def __call__(self, record: Record) -> Prompt:
        """The prompt of a conversation. Reads the headers of its images, and the frames of its videos."""
        record, _ = expanded(record, self._video, keep=False)
        asked, last = record.messages, record.messages[-1]
        if record.branches:
            rule, value = "must be 0 in a question", len(record.branches)
            fix = "write a record for each"
            raise invalid("branches", "question", value, rule, fix, where=record.name)

        if last.role == DOCUMENT:
            rule = "are a document of texts, which asks nothing"
            raise invalid("messages", "document", ..., rule, "give a question", where=record.name)
        answer = None
        if last.role == "assistant":
            asked = asked[:-1]
            answer = "".join(part for part in last.parts if isinstance(part, str))

        if not asked:
            rule = "must hold a question before the answer"
            raise invalid("messages", "no_question", ..., rule, "give one", where=record.name)
        whole = replace(record, messages=(*asked, Message("assistant", (_ANSWER,))))
        layouts = [
            self.pictures.layout(self.pictures.read(p), p.name, p.caps) for p in record.pictures
        ]
        sample = sample_of(whole, layouts, self.tokens, self.pictures, self._until)

        if not len(sample.tokens):
            rule = "must give a prompt of at least one token"
            raise invalid("messages", "empty", ..., rule, "ask something", where=record.name)
        return Prompt(record.name, sample.tokens, sample.pictures, sample.layouts, answer)

    def of(self, text: str, pictures: Sequence[Path]) -> Prompt:
        """The prompt of one question: images in order, then the text."""
        given = tuple(EncodedImage(str(path), path) for path in pictures)
        parts = (*range(len(given)), *([text] if text else []))
        return self(Record("the prompt", (Message("user", parts),), given))

    def media(self, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        """Media by name of the images of all prompts, row by row (N, ...); without any, of no entries. Decodes images."""
        parts = [self.pictures.nothing()]
        for prompt in prompts:
            for picture, layout in zip(prompt.pictures, prompt.layouts):
                read = self.pictures.read(picture)
                parts.append(self.pictures.media(read, layout, picture.name, picture.caps))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def text(self, ids: Sequence[int]) -> str:
        """The text of new tokens, up to the first end token."""
        return self.tokens.decode([*takewhile(lambda i: i not in self.end_ids, ids)])

    def _until(self, record: Record) -> Iterator[ChatSegment]:
        """The segments of a conversation up to its last answer."""
        last = sum(m.role == "assistant" for m in record.messages) - 1
        for piece in self.template(record):
            if piece.answer == last:
                return
            yield piece
