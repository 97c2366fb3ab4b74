"""A small tokenizer, four kinds of chat templates and conversations, for the tests of chat sources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WORDS = "the sky is blue, what color has it? think about light. grass green yes no " * 8
SPECIALS = ["<|end|>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|stop|>"]

#: Roles between two special tokens.
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
#: A begin token, headers, trimmed content; tools where there are some.
HEADERS = (
    "<|end|>{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{{ '<|head|>' + m.role + '<|/head|>\\n\\n' + m.content | trim + '<|stop|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\\n\\n' }}{% endif %}"
)
#: The same as CHATML, with the assistant's part marked.
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
#: Reasoning stays in the messages behind the last one of the user, and is dropped before it.
FORGETFUL = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' and m.reasoning_content and loop.index0 > ns.last %}"
    "{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "marked": MARKED, "forgetful": FORGETFUL}


def save_tokenizer(folder: Path, template: str | None = CHATML, **options: Any) -> Any:
    """A byte-level BPE of 320 ids in `folder`, as transformers saves it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator([WORDS], trainer)
    options = {"eos_token": "<|im_end|>", "pad_token": "<|end|>", **options}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=library, **options)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(str(folder))
    return tokenizer


def chat_message(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def dialog(*parts: str) -> list[dict[str, Any]]:
    """Messages of the user and the assistant in turn."""
    return [chat_message(("user", "assistant")[i % 2], part) for i, part in enumerate(parts)]


DIALOGS = [
    dialog("what color has the sky?", "the sky is blue"),
    [
        chat_message("system", "be short."),
        *dialog("is grass green?", " yes ", "and the sky?", "no, blue \U0001f600"),
    ],
    dialog("think", "about light.\n\nyes", "no?", "", "what", "grass\n"),
]


def write_dialogs(path: Path, dialogs: list[Any] = DIALOGS) -> Path:
    records = [t if isinstance(t, dict) else {"messages": t} for t in dialogs]
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path
