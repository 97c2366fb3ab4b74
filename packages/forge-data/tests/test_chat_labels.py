"""Ids and weights of conversations against text that is written by hand, without a template.

Each family of templates has a writer of its own, which says what a rendering is and which part of it each message trains.
Bytes of tokens come from the tokens themselves, not from the offsets of the library, which some tokenizers trim.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from forge_data import ChatConfig, InvalidData, batch_of
from forge_data.chat.messages import Record, conversation_of
from forge_data.chat.source import Conversations
from forge_data.chat.template import ChatTemplate
from forge_testing.problems import rejects

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

Messages = list[dict[str, Any]]


class Piece(NamedTuple):
    """Text of a rendering, and the number of the message that it trains."""

    text: str
    message: int | None = None


# ---- templates, with ⟦ and ⟧ around what the assistant says, and the same by hand


def heads(messages: Messages) -> list[Piece]:
    """Llama 3: headers, and texts without white space around them."""
    found = [Piece("<|begin_of_text|>")]
    for i, m in enumerate(messages):
        found.append(Piece(f"<|start_header_id|>{m['role']}<|end_header_id|>\n\n"))
        found.append(said(i, m, m["content"].strip() + "<|eot_id|>"))
    return found


HEADS = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "⟦{{ m.content | trim + '<|eot_id|>' }}⟧{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


def chatml(messages: Messages) -> list[Piece]:
    """Qwen 2.5: a system message where there is none."""
    greeting = "<|im_start|>system\nYou are a model.<|im_end|>\n"
    found = [Piece("" if messages[0]["role"] == "system" else greeting)]
    for i, m in enumerate(messages):
        found.append(Piece(f"<|im_start|>{m['role']}\n"))
        found += [said(i, m, m["content"] + "<|im_end|>"), Piece("\n")]
    return found


CHATML = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are a model.<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}⟦{{ m.content + '<|im_end|>' }}⟧{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def thinking(messages: Messages) -> list[Piece]:
    """Qwen 3: answers after the last user have a block of reasoning, others lose it."""
    last = max(i for i, m in enumerate(messages) if m["role"] == "user")
    found = []
    for i, m in enumerate(messages):
        text = m["content"]
        if m["role"] == "assistant" and i > last:
            text = f"<think>\n{m.get('reasoning_content', '')}\n</think>\n\n{text}"
        found.append(Piece(f"<|im_start|>{m['role']}\n"))
        found += [said(i, m, text + "<|im_end|>"), Piece("\n")]
    return found


THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "⟦{% if m.role == 'assistant' and loop.index0 > ns.last %}"
    "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}{{ m.content + '<|im_end|>' }}⟧"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def instructions(messages: Messages) -> list[Piece]:
    """Mistral: the system message within the first user's, no header of the assistant."""
    found, system = [Piece("<s>")], ""
    for i, m in enumerate(messages):
        if m["role"] == "system":
            system = m["content"] + "\n\n"
        elif m["role"] == "user":
            found.append(Piece(f"[INST] {system}{m['content']} [/INST]"))
            system = ""
        else:
            found.append(said(i, m, f" {m['content']}</s>"))
    return found


INSTRUCTIONS = (
    "{{ '<s>' }}{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.system = m.content + '\n\n' %}{% elif m.role == 'user' %}"
    "{{ '[INST] ' + ns.system + m.content + ' [/INST]' }}{% set ns.system = '' %}{% else %}"
    "⟦{{ ' ' + m.content + '</s>' }}⟧{% endif %}{% endfor %}"
)


def turns(messages: Messages) -> list[Piece]:
    """Gemma: the assistant is called model."""
    found = [Piece("<bos>")]
    for i, m in enumerate(messages):
        role = "model" if m["role"] == "assistant" else m["role"]
        found.append(Piece(f"<start_of_turn>{role}\n"))
        found += [said(i, m, m["content"].strip() + "<end_of_turn>"), Piece("\n")]
    return found


TURNS = (
    "{{ '<bos>' }}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "⟦{{ m.content | trim + '<end_of_turn>' }}⟧{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


def closed(messages: Messages) -> list[Piece]:
    """Phi 3: an end of the text where no answer is asked for."""
    found = []
    for i, m in enumerate(messages):
        found.append(Piece(f"<|{m['role']}|>\n"))
        found += [said(i, m, m["content"] + "<|end|>"), Piece("\n")]
    return [*found, Piece("<|endoftext|>")]


CLOSED = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' }}⟦{{ m.content + '<|end|>' }}⟧{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"
)


def marks(messages: Messages) -> list[Piece]:
    """GLM 4.5: an answer ends with the mark of the next role."""
    found = []
    for i, m in enumerate(messages):
        found += [Piece(f"<|{m['role']}|>"), said(i, m, m["content"])]
    return found


MARKS = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}⟦{{ m.content }}⟧{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def said(number: int, message: dict[str, Any], text: str) -> Piece:
    return Piece(text, number if message["role"] == "assistant" else None)


FAMILIES: dict[str, tuple[str, Callable[[Messages], list[Piece]]]] = {
    "heads": (HEADS, heads),
    "chatml": (CHATML, chatml),
    "thinking": (THINKING, thinking),
    "instructions": (INSTRUCTIONS, instructions),
    "turns": (TURNS, turns),
    "closed": (CLOSED, closed),
    "marks": (MARKS, marks),
}
SPECIALS = [
    *(
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|im_start|>",
    ),
    *(
        "<|im_end|>",
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "<bos>",
        "<start_of_turn>",
        "<end_of_turn>",
    ),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
]


def template_of(family: str, marked: bool) -> str:
    """The template, with `{% generation %}` around the assistant's texts or without."""
    text = FAMILIES[family][0]
    before, inside, after = text.replace("⟧", "⟦").split("⟦")
    if marked:
        inside = f"{{% generation %}}{inside}{{% endgeneration %}}"
        if family != "instructions":  # there in a branch of the assistant already
            plain = FAMILIES[family][0].replace("⟧", "⟦").split("⟦")[1]
            inside = f"{{% if m.role == 'assistant' %}}{inside}{{% else %}}{plain}{{% endif %}}"
    return before + inside + after


# ---- tokenizers, and the bytes of their tokens

WORDS = ["hello", " world", "\n", "\n\n", "  ", " ", "😀", "naïve", "日本語", "code:\n```\nx\n```", "1 2 3", ".", ", ", "<b>", "tab\t"]  # fmt: skip


def save_tokenizers(root: Path) -> None:
    """Bytes with offsets that are trimmed or not, as Qwen and Llama 3 have them, and pieces with bytes in reserve (Gemma)."""
    draw = random.Random(5)
    texts = ["".join(draw.choice(WORDS) for _ in range(50)) for _ in range(60)]
    for trim in (True, False):
        library = tokenizers.Tokenizer(tokenizers.models.BPE())
        library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = tokenizers.decoders.ByteLevel()
        library.post_processor = tokenizers.processors.ByteLevel(trim_offsets=trim)
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        options = {"vocab_size": 400, "initial_alphabet": alphabet, "special_tokens": SPECIALS}
        _save(library, texts, root / ("trimmed" if trim else "bytes"), **options)

    library = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    library.normalizer = normalizers.Sequence(steps)
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence(back)
    reserve = [f"<0x{i:02X}>" for i in range(256)]
    _save(
        *(library, texts, root / "pieces"),
        vocab_size=600,
        special_tokens=["<unk>", *SPECIALS, *reserve],
    )


def _save(library: Any, texts: list[str], folder: Path, **options: Any) -> None:
    trainer = tokenizers.trainers.BpeTrainer(show_progress=False, **options)
    library.train_from_iterator(texts, trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=library).save_pretrained(str(folder))


def byte_spans(kind: str, tokens: list[str]) -> list[tuple[int, int]]:
    """First byte and the byte after the last of each token in the text."""
    alphabet = {c: b for b, c in _byte_characters().items()}
    found, at, begins = [], 0, True
    for token in tokens:
        if token in SPECIALS:
            size, begins = len(token.encode()), True
        elif kind != "pieces":
            size = len(bytes(alphabet[c] for c in token))
        else:
            if token.startswith("<0x"):
                size = 1
            else:
                size = len(token.replace("▁", " ").encode())
                size -= begins  # the mark that begins each text between special tokens
            begins = False
        found.append((at, at + size))
        at += size
    return found


def _byte_characters() -> dict[int, str]:
    """Characters that stand for bytes in GPT-2's byte-level tokens: those that print, and others from 256 on."""
    prints = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in prints]
    return {**{b: chr(b) for b in prints}, **{b: chr(256 + i) for i, b in enumerate(others)}}


# ---- conversations, and what is trained of them


def draw_conversation(draw: random.Random, family: str) -> Messages:
    def text() -> str:
        return "".join(draw.choice(WORDS) for _ in range(draw.choice((1, 3, 8, 20))))

    messages = []
    if draw.random() < 0.3:
        messages.append({"role": "system", "content": text()})
    for _ in range(draw.choice((1, 1, 2, 3))):
        content = draw.choice(("", " ", "\n\n")) + text() + draw.choice(("", "", "\n"))
        answer = {"role": "assistant", "content": "" if draw.random() < 0.08 else content}
        if family == "thinking" and draw.random() < 0.6:
            answer["reasoning_content"] = text()
        if draw.random() < 0.15:
            answer["weight"] = draw.choice((0, 0.5, 2.0))
        messages += [{"role": "user", "content": text()}, answer]
    if draw.random() < 0.1:
        messages.append({"role": "user", "content": text()})
    return messages


class Expected(NamedTuple):
    """Ids, the weight of each in the loss, and the special token that ends each trained answer; or the code of the problem.

    A weight is None where a tokenizer that trims leaves no character of a token in the part.
    """

    ids: list[int]
    weights: list[float | None]
    ends: list[int | None]
    problem: str | None = None


def expected(
    folder: Path, family: str, messages: Messages, train_on: str, marked: bool
) -> Expected:
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    pieces = FAMILIES[family][1](messages)
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    chosen = answers[-1:] if train_on == "last" else answers
    factors = {i: float(messages[i].get("weight", 1.0)) for i in chosen}
    factors = {i: factor for i, factor in factors.items() if factor > 0.0}

    encoding = library.encode("".join(piece.text for piece in pieces), add_special_tokens=False)
    ids, tokens = encoding.ids, encoding.tokens
    if problem := _problem(family, messages, answers, factors, pieces, marked):
        return Expected(ids, [], [], problem)
    if family == "closed" and not marked and answers[-1] in factors:
        # without marks an answer is all that it adds to the text of the prompt
        pieces[-2:] = [Piece(piece.text, answers[-1]) for piece in pieces[-2:]]

    spans, special = byte_spans(folder.name, tokens), [token in SPECIALS for token in tokens]
    weights: list[float | None] = [0.0] * len(ids)
    trained: dict[int, int] = {}  # the last token of each message
    begin = 0
    for piece in pieces:
        end = begin + len(piece.text.encode())
        if piece.message in factors:
            for t, (first, last) in enumerate(spans):
                if first < end and begin < max(last, first + 1):  # also a mark without a byte
                    trained[piece.message], weights[t] = t, factors[piece.message]
                    if folder.name == "trimmed" and _is_outside(tokens[t], first, begin):
                        weights[t] = None
        begin = end

    if len(trained) < len(factors):  # an answer without tokens: the last end is trained
        trained = dict([*trained.items()][-1:])
    ends: list[int | None] = []
    for number, last in trained.items():
        if not special[last] and last + 1 < len(ids) and special[last + 1]:
            last += 1
            weights[last] = factors[number]
        ends.append(ids[last] if special[last] else None)
    return Expected(ids, weights, ends)


def _is_outside(token: str, first: int, begin: int) -> bool:
    """Whether a token of bytes from `first` on has only spaces at its end from byte `begin` on."""
    return first < begin and first + len(token.rstrip("Ġ")) <= begin


def _problem(
    family: str,
    messages: Messages,
    answers: list[int],
    factors: dict[int, float],
    pieces: list[Piece],
    marked: bool,
) -> str | None:
    """Why labels of a conversation are not known."""
    users = [i for i, m in enumerate(messages) if m["role"] == "user"]
    if marked:
        # weights go to marked parts by their number, and an empty one is none
        parts = [p for p in pieces if p.message is not None and p.text]
        plain = len(factors) == len(answers) and set(factors.values()) <= {1.0}
        return None if plain or len(parts) == len(answers) else "marks"
    changed = {
        # earlier answers are rendered without their reasoning
        "thinking": any(i < users[-1] for i in factors),
        # the end of the text follows each beginning of it
        "closed": any(i < len(messages) - 1 for i in factors),
    }
    return "not_a_prefix" if changed.get(family) else None


# ---- tests


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokenizers")
    save_tokenizers(root)
    for family in FAMILIES:
        for marked in (True, False):
            (root / f"{family} {marked}.jinja").write_text(template_of(family, marked))
    return root


def check_labels(folders: Path, family: str, count: int) -> None:
    """`count` conversations of each tokenizer, with marks and without, of all answers and the last."""
    draw, outcomes = random.Random(family), Counter()
    # parts that end with spaces, which have no characters in a tokenizer that trims
    kinds = ("bytes", "pieces") if family == "marks" else ("bytes", "trimmed", "pieces")
    for kind in kinds:
        for marked in (True, False):
            for train_on in ("assistant", "last"):
                file = str(folders / f"{family} {marked}.jinja")
                config = ChatConfig(str(folders / kind), file, train_on=train_on)
                template = ChatTemplate(config)
                for _ in range(count):
                    messages = draw_conversation(draw, family)
                    wanted = expected(folders / kind, family, messages, train_on, marked)
                    record = conversation_of(Record("line 7", {"messages": messages}), config)
                    if wanted.problem is not None:
                        key = {"marks": "weight", "not_a_prefix": "template"}[wanted.problem]
                        with rejects(key, ..., wanted.problem, InvalidData, where="line 7"):
                            template.encode(record)
                        outcomes["rejected"] += 1
                        continue
                    ids, weights, ends = template.encode_answers(record)
                    assert ids.tolist() == wanted.ids, messages
                    pairs = zip(weights.tolist(), wanted.weights)
                    assert all(b in (a, None) for a, b in pairs), (kind, marked, messages)
                    assert ends == wanted.ends, messages
                    outcomes["equal"] += 1
    assert outcomes["equal"] > outcomes["rejected"] + 2 * count, outcomes


@pytest.mark.parametrize("family", FAMILIES)
def test_labels_are_those_that_are_written_by_hand(folders: Path, family: str) -> None:
    check_labels(folders, family, 4)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_labels_of_many_conversations_are_those_that_are_written_by_hand(
    folders: Path, family: str
) -> None:
    check_labels(folders, family, 60)


#: Tokens, labels, positions and weights of labels of a conversation in a row.
Document = tuple[tuple[float, ...], ...]


def document_of(wanted: Expected, seq_len: int) -> Document:
    """The first tokens of a conversation: each predicts the next one, the last nothing."""
    ids, weights = wanted.ids[:seq_len], wanted.weights[:seq_len]
    labels = [i if w else -100 for i, w in zip(ids[1:], weights[1:])]
    of_labels = [*(w or 0.0 for w in weights[1:]), 0.0]
    return tuple(ids), (*labels, -100), tuple(range(len(ids))), tuple(of_labels)


def documents_of(batch: Any) -> list[Document]:
    """Those of all rows, which have padding after them."""
    found = []
    weights = (batch.labels >= 0).float() if batch.weights is None else batch.weights
    for row in range(len(batch)):
        numbers = batch.document_ids[row].tolist()
        used = sum(number >= 0 for number in numbers)
        assert numbers == sorted(numbers[:used]) + [-1] * (len(numbers) - used)
        assert batch.labels[row, used:].eq(-100).all()
        for number in range(max(numbers) + 1):
            here = batch.document_ids[row] == number
            arrays = (batch.tokens, batch.labels, batch.positions, weights)
            found.append(tuple(tuple(array[row][here].tolist()) for array in arrays))
    return sorted(found)


@pytest.mark.parametrize("too_long", ["refuse", "truncate", "skip"])
@pytest.mark.parametrize("family", ["chatml", "instructions", "marks"])
def test_rows_of_conversations_have_these_labels_each_once_an_epoch(
    folders: Path,
    family: str,
    too_long: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "cache"))
    draw = random.Random(too_long)
    talks = [draw_conversation(draw, family) for _ in range(25)]
    wanted = [expected(folders / "bytes", family, talk, "assistant", False) for talk in talks]
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))

    config = ChatConfig(
        str(folders / "bytes"), str(folders / f"{family} False.jinja"), too_long=too_long
    )
    lengths = sorted(len(each.ids) for each in wanted)
    seq_len = lengths[-1] if too_long == "refuse" else lengths[12]
    if too_long == "skip":
        wanted = [each for each in wanted if len(each.ids) <= seq_len]
    elif too_long == "truncate":  # what has no label left is left out, too
        wanted = [
            each for each in wanted if len(each.ids) <= seq_len or any(each.weights[1:seq_len])
        ]
    documents = sorted(document_of(each, seq_len) for each in wanted)
    stream = Conversations(path, config).stream(seq_len, seed=3)
    for epoch in (0, 1):
        batch = batch_of(stream, range(epoch * len(stream), (epoch + 1) * len(stream)))
        assert documents_of(batch) == documents
        assert batch.label_weight == pytest.approx(sum(sum(d[3]) for d in documents))
