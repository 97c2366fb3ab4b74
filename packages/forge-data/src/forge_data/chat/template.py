"""A conversation becomes token ids, and the weight of each in the loss, by the template of its tokenizer.

Where the template marks the assistant's messages with `{% generation %}`, transformers' mask is taken. Without, it
would be all zeros; then a message is what its rendering adds to that of the messages before it, which needs each
rendering to begin the next one: templates that rewrite earlier messages raise InvalidData.

    T   tokens of a conversation
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np

from forge_data._shared.paths import read_regular, user_path
from forge_data._shared.problems import invalid
from forge_data._shared.record_keys import MEDIA, WEIGHTS, Keys, RecordKeys, is_empty
from forge_data._shared.tokenizer_settings import switch_off_settings
from forge_data.chat.messages import Conversation
from forge_data.errors import InvalidData, invalid_data
from forge_data.kinds import ChatConfig

__all__ = ["ChatTemplate"]

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MAX_TEMPLATE = 1 << 20  # bytes; a larger file is taken for a mistake and not read
# forge-data itself reads these keys, so that no template decides about them
_OWN = ("role", "content", "weight")
_NOT_OF_TEMPLATES = frozenset((*_OWN, *MEDIA, *WEIGHTS))
_ASKED, _SAID = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
_CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}
_CALLED = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
#: Short conversations that show how a template ends answers and calls of tools; several, as some take no tools.
_TALKS: tuple[list[dict[str, Any]], ...] = (
    [_ASKED, _SAID, _ASKED, _SAID],
    [_ASKED, _SAID],
    [_ASKED, _SAID, {"role": "tool", "content": "c"}, _SAID],
    [_ASKED, _CALLED, {"role": "tool", "content": "c"}, _SAID],
    [_ASKED, _CALLED],
)


class ChatTemplate:
    """The template of a tokenizer's folder, or of a file: `ChatTemplate(config).encode(conversation)`.

    Raises ValueError without transformers, InvalidData for a folder without tokenizer or template.
    """

    def __init__(self, config: ChatConfig) -> None:
        assert config.tokenizer is not None  # SourceConfig raises for conversations without one
        self.config = config
        self.folder = user_path(config.tokenizer)
        self.tokenizer = _load(self.folder)

        # with None transformers takes that of the tokenizer's folder
        self.template: str | None = None
        if config.template is not None:
            try:
                self.template = read_regular(
                    user_path(config.template), _MAX_TEMPLATE, InvalidData
                ).decode("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                rule, fix = f"must be a file of UTF-8 text ({error})", "check the path"
                name, kind = config.template, InvalidData
                raise invalid("template", "unreadable", name, rule, fix, kind=kind) from None
        elif not self.tokenizer.chat_template:
            rule = "has no chat template"
            fix = "set template to a file with one, or use the tokenizer of a model that was tuned to conversations"
            raise invalid_data("tokenizer", "no_template", str(self.folder), rule, fix)

        special = {
            number: token.content
            for number, token in self.tokenizer.added_tokens_decoder.items()
            if token.special
        }
        self._specials, self._special_ids = tuple(special.values()), [*special]
        # by role and key: found once, as it costs renderings
        self._read: dict[tuple[str, str], bool] = {}

    @property
    def vocab_size(self) -> int:
        """Above the largest id; ids may have holes."""
        return int(max(self.tokenizer.get_vocab().values())) + 1

    def spec(self) -> dict[str, Any]:
        """What `load_tokenizer` makes the same tokenizer of."""
        path = self.folder / "tokenizer.json"
        ends = [name for name in self.ends if name != self.tokenizer.eos_token]
        return {
            "name": "json",
            "path": str(path.resolve()),
            "eos": self.tokenizer.eos_token,
            **self._begin_of_spec(),
            **({"ends": ends} if ends else {}),
            "fingerprint": hashlib.sha256(path.read_bytes()).hexdigest(),
        }

    def _begin_of_spec(self) -> dict[str, list[str]]:
        """bos_token as `bos` of a spec, where the template writes it first: prompts of a run begin as its conversations."""
        name, asked = self.tokenizer.bos_token, [_ASKED]
        try:
            text = self._text(Conversation("a question", asked, [1.0], None), 1, False)
        except InvalidData:  # the template fails on this question, so that its begin is not known
            return {}
        return {"bos": [name]} if name and text.startswith(name) else {}

    @cached_property
    def ends(self) -> list[str]:
        """The special tokens that end trained answers, found in renderings of a few short conversations.

        A model that was trained on its conversations ends an answer by them, whatever end token the tokenizer has.
        """
        found: dict[int, None] = {}
        plain = copy.copy(self)
        for messages in _TALKS:
            talk = Conversation("a short conversation", messages, [1.0] * len(messages), None)
            # templates that forget earlier answers raise for "assistant", so that "last" is tried, too
            for train_on in ("assistant", "last")[self.config.train_on == "last" :]:
                plain.config = replace(self.config, train_on=train_on)  # type: ignore[arg-type]
                # raised by templates without tools, or of one turn
                with contextlib.suppress(InvalidData):
                    found |= {end: None for end in plain.encode_answers(talk)[2] if end is not None}
                    break
        return [str(name) for name in self.tokenizer.convert_ids_to_tokens([*found])]

    def digest(self) -> str:
        """sha256 of the template, or of all that the tokenizer has."""
        text = self.template or json.dumps(self.tokenizer.chat_template, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def encode(self, conversation: Conversation) -> tuple[np.ndarray, np.ndarray]:
        """(ids (T,) int64, weights (T,) fp32: of the loss of each token, 0 where nothing is trained)."""
        return self.encode_answers(conversation)[:2]

    def encode_answers(
        self, conversation: Conversation
    ) -> tuple[np.ndarray, np.ndarray, list[int | None]]:
        """The same, and the special token that ends each trained answer, None for one without.

        Ids are those of `apply_chat_template`. Time: one rendering; without `{% generation %}` two more for each message
        that has a weight. Raises InvalidData, naming the place, where the template fails or does not fit `train_on`.
        """
        marked = self.config.train_on != "all" and self._has_marks(conversation)
        out = self._apply(
            conversation,
            conversation.messages,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=marked,
        )
        ids = np.asarray(out["input_ids"], np.int64)
        if not ids.size:
            rule, fix = "has no tokens after its template", "correct the template"
            raise invalid_data("", "empty", ..., rule, fix, where=conversation.place)

        factors = self._factors(conversation)
        if self.config.train_on == "all" and set(factors) == {1.0}:
            weights = np.ones(len(ids), np.float32)
        elif marked:
            weights = self._by_marks(conversation, self._marked(conversation, out), factors)
        else:
            weights = self._by_prefixes(conversation, out.encodings[0].offsets, factors)
        return ids, weights, self._train_ends(conversation, ids, weights, factors)

    def check_keys(self, c: Conversation, keys: RecordKeys) -> None:
        """Count keys of messages that the template does not read; raises InvalidData for those whose content would be lost.

        Media and weights are never read: a run of text has no media, and its weights are those of `weight`.
        """
        for number, message in enumerate(c.messages):
            others = [k for k in message if k not in _NOT_OF_TEMPLATES and not is_empty(message[k])]
            read = frozenset((*_OWN, *(k for k in others if self._reads(c, number, k))))
            keys.check(Keys(read, inside="messages"), message, f"{c.place} message {number}")

    def _reads(self, c: Conversation, number: int, key: str) -> bool:
        """Whether the template renders a message differently without a key, found at the first message of a role with it.

        The conversation is rendered up to the message, as some templates drop earlier reasoning, and whole; with the other
        keys of the message and without, as one key may stand in for another. A value that the template leaves out, such as a
        flag at its default, is not seen.
        """
        own, end = c.messages[number], len(c.messages)

        def text(message: dict[str, Any], stop: int) -> str | None:
            messages = [*c.messages[:number], message, *c.messages[number + 1 : stop]]
            with contextlib.suppress(InvalidData):
                return self._text(c._replace(messages=messages), stop, False)
            return None

        found = self._read.get((own["role"], key))
        if found is None:
            bare = {name: own[name] for name in ("role", "content", key) if name in own}
            found = self._read[own["role"], key] = any(
                text(given, stop) != text({k: v for k, v in given.items() if k != key}, stop)
                for given, stop in product((own, bare), (number + 1, end))
            )
        return found

    def holds_specials(self, conversation: Conversation) -> bool:
        """Whether a text of a message or a tool has a special token's, which becomes that token as if the template had put it."""
        texts = [*_texts(conversation.messages), *_texts(conversation.tools)]
        return any(special in text for text in texts for special in self._specials)

    def _factors(self, conversation: Conversation) -> list[float]:
        """The weight of each message: its own where `train_on` trains it, else 0."""
        said = [i for i, m in enumerate(conversation.messages) if m["role"] == "assistant"]
        trained = {"assistant": said, "last": said[-1:], "all": range(len(conversation.messages))}
        chosen = set(trained[self.config.train_on])
        return [w if i in chosen else 0.0 for i, w in enumerate(conversation.weights)]

    def _marked(self, c: Conversation, out: Any) -> np.ndarray:
        """The mask (T,) of transformers, or one by offsets where a marked part begins or ends with a character that no token
        has: transformers' ends before such a part, or goes on after it. Tokenizers that trim white space do so."""
        mask, encoding = np.asarray(out["assistant_masks"]), out.encodings[0]
        offsets = encoding.offsets
        if all(start <= stop for (_, stop), (start, _) in pairwise([(0, 0), *offsets])):
            return mask
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered: Any = render_jinja_template(
            conversations=[c.messages],
            tools=c.tools,
            chat_template=self.tokenizer.get_chat_template(self.template, c.tools),
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        parts = [(first, last) for first, last in rendered[1][0] if first < last]
        edges = [place for first, last in parts for place in (first, last - 1)]
        if all(encoding.char_to_token(place) is not None for place in edges):
            return mask
        mask[:] = 0
        for first, last in parts:
            mask[_between(c.place, offsets, first, last)] = 1
        return mask

    def _by_marks(
        self, conversation: Conversation, mask: np.ndarray, factors: list[float]
    ) -> np.ndarray:
        """Weights (T,) by a mask (T,) of the assistant's tokens."""
        said = [f for f, m in zip(factors, conversation.messages) if m["role"] == "assistant"]
        weights = mask.astype(np.float32)
        if set(said) == {1.0}:
            return weights
        edges = np.flatnonzero(np.diff(mask, prepend=0, append=0)).reshape(-1, 2)
        if len(edges) != len(said):
            rule = f"of its {len(said)} messages of the assistant must be 1, as the template marks {len(edges)} parts"
            fix, where = 'remove weight, or set train_on = "assistant"', conversation.place
            raise invalid_data("weight", "marks", ..., rule, fix, where=where)
        for (start, stop), factor in zip(edges, said):
            weights[start:stop] = factor
        return weights

    def _by_prefixes(
        self, conversation: Conversation, offsets: Sequence[tuple[int, int]], factors: list[float]
    ) -> np.ndarray:
        """Weights (T,) by what each message adds to the text; `offsets` are the characters of each token."""
        weights = np.zeros(len(offsets), np.float32)
        whole = self._text(conversation, len(conversation.messages), False)
        for number, factor in enumerate(factors):
            if factor == 0.0:
                continue
            first = self._begin(conversation, whole, number)
            last = self._length(conversation, whole, number, number + 1, False)
            last = first + len(self._trained_text(whole[first:last]))
            weights[_between(conversation.place, offsets, first, last)] = factor
        return weights

    def _train_ends(
        self, c: Conversation, ids: np.ndarray, weights: np.ndarray, factors: list[float]
    ) -> list[int | None]:
        """The special token that ends each trained answer; one right after an answer gets its weight, in place.

        Some templates end an answer by the mark of the next role (GLM), or after `{% endgeneration %}`.
        """
        special = np.isin(ids, self._special_ids)  # (T,)
        if self.config.train_on == "all":
            # where earlier answers end is not known without further renderings
            answers = [[0, len(ids)]] if c.messages[-1]["role"] == "assistant" else []
        else:
            edges = np.diff(weights > 0, prepend=0, append=0)
            answers = np.flatnonzero(edges).reshape(-1, 2).tolist()
            if len(answers) != sum(factor > 0 for factor in factors):
                answers = answers[-1:]  # an answer of several parts: only the last end is sure
        ends: list[int | None] = []
        for start, stop in answers:
            last = stop - 1
            # a part may end by a line break after its last token
            while last > start and self.tokenizer.decode(ids[last]).isspace() and not special[last]:
                last -= 1
            if not special[last] and stop < len(ids) and special[stop]:
                last, weights[stop] = stop, weights[stop - 1]
            ends.append(int(ids[last]) if special[last] else None)
        return ends

    def _trained_text(self, text: str) -> str:
        """A message without the white space that follows its last token, where that is a special one."""
        ended = text.rstrip()
        return ended if self.config.train_on != "all" and ended.endswith(self._specials) else text

    def _begin(self, c: Conversation, whole: str, number: int) -> int:
        """Characters before the trained text of a message: the prompt is not trained."""
        if self.config.train_on == "all":
            return self._length(c, whole, number, number, False)
        if number and c.messages[number - 1]["role"] != "assistant":
            return self._length(c, whole, number, number, True)
        # Without a message of the user before it, many templates give no prompt.
        asked = c._replace(messages=[_ASKED])
        prompt = self._text(asked, 1, True)[len(self._text(asked, 1, False)) :]
        before = self._length(c, whole, number, number, False)
        place = whole.find(prompt, before, self._length(c, whole, number, number + 1, False))
        if place >= 0:
            return place + len(prompt)
        rule = f"does not begin in the template with {prompt!r:.80}, its prompt for the assistant, so that its tokens are not known"
        fix = "put a message of the user before it, or use a template with {% generation %}"
        where = f"{c.place} message {number}"
        raise invalid_data("", "no_prompt", ..., rule, fix, where=where)

    def _length(self, c: Conversation, whole: str, number: int, count: int, prompt: bool) -> int:
        """Characters of the rendering of the first `count` messages, with which `whole` must begin."""
        text = self._text(c, count, prompt)
        if whole.startswith(text):
            return len(text)
        rule = (
            f"renders the first {count} messages{' and a prompt' if prompt else ''} differently without the rest of the "
            "conversation (some drop earlier reasoning), so that its tokens are not known"
        )
        last = "" if self.config.train_on == "last" else 'set train_on = "last", or '
        where, fix = f"{c.place} message {number}", f"{last}use a template with {{% generation %}}"
        raise invalid_data("template", "not_a_prefix", ..., rule, fix, where=where)

    def _text(self, conversation: Conversation, count: int, prompt: bool) -> str:
        if count == 0:
            return ""
        messages = conversation.messages[:count]
        options = {"tokenize": False, "add_generation_prompt": prompt}
        return str(self._apply(conversation, messages, **options))

    def _apply(self, c: Conversation, messages: list[dict[str, Any]], **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=c.tools, chat_template=self.template, **options
            )
        except Exception as error:
            # a template raises what it likes, so that no other class covers it
            message = (str(error).splitlines() or [type(error).__name__])[0]
            rule = f"does not take its first {len(messages)} messages ({message:.200})"
            where, fix = c.place, "correct them, or the template"
            raise invalid_data("template", "raised", ..., rule, fix, where=where) from error

    def _has_marks(self, conversation: Conversation) -> bool:
        template = self.tokenizer.get_chat_template(self.template, conversation.tools)
        return _MARKS.search(template) is not None


def _between(place: str, offsets: Sequence[tuple[int, int]], first: int, last: int) -> slice:
    """The tokens of characters `first` to `last`; InvalidData where these have none.

    A token without characters is white space that its tokenizer trimmed off, up to where it stands.
    """
    starts, stops = np.asarray(offsets).T  # (T,)
    own = (stops > starts) | (starts > first)
    inside = np.flatnonzero((stops > first) & (starts < last) & own)
    if inside.size or first == last:
        return slice(int(inside[0]), int(inside[-1]) + 1) if inside.size else slice(0, 0)
    rule, fix = "has a trained part without a token", "remove its message, or save the tokenizer with trim_offsets false"  # fmt: skip
    raise invalid_data("", "no_token", ..., rule, fix, where=place)


def _texts(value: Any) -> Iterator[str]:
    """All strings of plain data, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value:
            yield from _texts(each)
        yield from _texts([*value.values()] if isinstance(value, dict) else None)


def _load(folder: Path) -> Any:
    name = str(folder)

    try:
        from transformers import AutoTokenizer
    except ImportError:
        rule, fix = "needs transformers, which is not installed", "pip install 'forge-data[chat]'"
        raise invalid("tokenizer", "requires", name, rule, fix) from None

    if not (folder / "tokenizer.json").is_file():
        rule, fix = "must be a folder of transformers with tokenizer.json", "check the path"
        raise invalid_data("tokenizer", "not_found", name, rule, fix)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers raises errors of many kinds, by what is missing
        message = (str(error).splitlines() or [type(error).__name__])[0]
        rule, fix = f"must be a folder that transformers loads ({message:.200})", "save it again"
        raise invalid_data("tokenizer", "not_loaded", name, rule, fix) from None

    if not tokenizer.is_fast:
        rule = "must be of the tokenizers library, which has the characters of a token"
        raise invalid_data("tokenizer", "not_fast", name, rule, "convert it")
    switch_off_settings(tokenizer.backend_tokenizer)
    return tokenizer
