# Copied from scripts/shared/special_tokens.py; edit that file, then run scripts/copy_shared.py.
"""The tokens that begin and end a text, as the files of a tokenizer define them, each with its reason.

    tokenizer = Tokenizer.from_file("llama/tokenizer.json")
    begin_tokens(tokenizer, Path("llama"))  # Found([(1, "<s>")], "the post-processor of tokenizer.json writes it")
    end_tokens(tokenizer, Path("llama"))    # Found([(2, "</s>")], "eos_token in tokenizer_config.json")

A tokenizer of the tokenizers library, after `switch_off_settings`. `folder` is where its tokenizer_config.json and
special_tokens_map.json are, if any. ValueError for one that is not JSON, or that names a token which the vocabulary lacks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from .problems import invalid

#: End tokens of published tokenizers, where only tokenizer.json is known.
USUAL_ENDS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "[EOS]", "<EOS_TOKEN>")  # noqa: RUF001 # fmt: skip

_WRITTEN = "the post-processor of tokenizer.json writes it"


class Found(NamedTuple):
    """(id, name) of each token, and the reason for them, or for there being none."""

    tokens: list[tuple[int, str]]
    reason: str


def begin_tokens(tokenizer: Any, folder: Path | None = None) -> Found:
    """The tokens that begin a text, in order: those that the post-processor writes before it.

    Where it writes none, bos_token if add_bos_token is true, as transformers 4 does (DeepSeek's files need it).
    """
    written, _ = _written(tokenizer)
    if written:
        # some files write the same token twice
        once = [token for i, token in enumerate(written) if i == 0 or token != written[i - 1]]
        return Found(once, _WRITTEN)
    config = _config(folder)
    if "bos_token" in config and config.get("add_bos_token", (False,))[0] is True:
        return Found([_named(tokenizer, config, "bos_token")], "add_bos_token in tokenizer_config.json")  # fmt: skip
    return Found([], "no file of the tokenizer asks for one")


def end_tokens(tokenizer: Any, folder: Path | None = None) -> Found:
    """The tokens that may end a text: one, if the files agree.

    eos_token; where none is named, the one that the post-processor writes after a text; then the usual names that are
    special tokens: Gemma has an HTML tag </s> that is not one.
    """
    config = _config(folder)
    if "eos_token" in config:
        return Found([_named(tokenizer, config, "eos_token")], f"eos_token in {config['eos_token'][1].name}")  # fmt: skip
    _, written = _written(tokenizer)
    if written:
        return Found(written[:1], _WRITTEN)
    added = tokenizer.get_added_tokens_decoder().items()
    special = {token.content: number for number, token in added if token.special}
    usual = [(special[name], name) for name in USUAL_ENDS if name in special]
    return Found(usual, "a usual name, and a special token" if usual else "no file of the tokenizer names one")  # fmt: skip


def _config(folder: Path | None) -> dict[str, tuple[Any, Path]]:
    """The values of a folder that are not null, each with its file; as transformers merges them."""
    found: dict[str, tuple[Any, Path]] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = None if folder is None else folder / name
        # transformers reads the second file only where the first does not list the added tokens
        if path is None or not path.is_file() or "added_tokens_decoder" in found:
            continue
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(table, dict):
                raise ValueError("a list or a single value")
        except (ValueError, RecursionError) as error:
            rule, fix = f"must be a JSON object ({error!s:.80})", "save the tokenizer again"
            raise invalid("", "not_json", ..., rule, fix, where=path) from None
        for key, value in table.items():
            if key.endswith("_token") and isinstance(value, dict):
                value = value.get("content")
            if value is not None:
                found[key] = value, path
    return found


def _named(tokenizer: Any, config: dict[str, tuple[Any, Path]], key: str) -> tuple[int, str]:
    name, path = config[key]
    number = tokenizer.token_to_id(name) if isinstance(name, str) else None
    if number is None:
        rule, fix = (
            "must be in the vocabulary of tokenizer.json",
            "correct it, or name another token",
        )
        raise invalid(key, "unknown", name, rule, fix, where=path)
    return number, name


def _written(tokenizer: Any) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """(id, name) of the tokens that the post-processor writes before and after a text, seen at a text."""
    if tokenizer.post_processor is None:
        return [], []
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    for text in ("a", *added):
        try:
            found = tokenizer.encode(text)
        except (
            Exception
        ):  # the library raises bare Exception where a vocabulary has no unknown token
            continue
        tokens = list(zip(found.ids, found.tokens))
        inside = [i for i, written in enumerate(found.special_tokens_mask) if not written]
        if inside:
            return tokens[: inside[0]], tokens[inside[-1] + 1 :]
    return [], []
