"""What is known of a source before its text is read."""

from __future__ import annotations

from typing import Any

from forge_data.protocols import Tokenizer
from forge_data.tokenizer import ByteTokenizer, JsonTokenizer, describe_ends, document_tokenizer

__all__ = ["Header", "tokenizer_of"]


class Header:
    """Vocabulary and tokenizer of a source whose text may not be tokenized yet; `num_tokens` is None then.

    `max_token_id` is the bound that the vocabulary gives, `ends` what `describe_ends` says.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer: dict[str, Any] = tokenizer.spec()
        self.vocab_size: int | None = tokenizer.vocab_size
        self.max_token_id = tokenizer.vocab_size - 1
        self.num_tokens: int | None = None
        self.ends = describe_ends(tokenizer)
        self.known = ""  # what the source says of itself, if the cache has it

    def summary(self) -> str:
        """A line that says what is known of the source."""
        if self.known:
            return f"in the cache, {self.known}"
        return "its tokens are not counted before `forge-train run` tokenizes it"


def tokenizer_of(table: Any) -> ByteTokenizer | JsonTokenizer:
    """The tokenizer of a table with `tokenizer`, `eos` and `bos`; raises as `document_tokenizer`."""
    return document_tokenizer(table.tokenizer, table.eos, table.bos)
