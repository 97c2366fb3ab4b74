"""What every source offers, and how a config becomes one."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import numpy as np

from forge_data.config import SourceConfig
from forge_data.sources.builtin import BuiltinCorpus
from forge_data.sources.token_files import TokenFiles


class Source(Protocol):
    """A stream of token ids cut into documents.

    `documents` holds the sorted int64 start offset of each document, the first 0; `tokenizer` is a
    spec for `load_tokenizer`, `vocab_size` and `tokenizer` are None where nobody recorded them.
    """

    vocab_size: int | None
    tokenizer: dict[str, Any] | None

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_documents(self) -> int: ...

    @property
    def documents(self) -> np.ndarray: ...

    @property
    def max_token_id(self) -> int: ...

    def read(self, start: int, stop: int) -> np.ndarray:
        """Ids of tokens start..stop-1, read-only, in the source's own integer type."""
        ...

    def fingerprint(self) -> dict[str, str | int]:
        """What identifies the tokens, as JSON; `documents` is the digest of the document offsets."""
        ...


_MEMBERS = (
    "vocab_size",
    "tokenizer",
    "num_tokens",
    "num_documents",
    "documents",
    "max_token_id",
    "read",
    "fingerprint",
)


def open_source(config: SourceConfig) -> Source:
    """The source that a config names; an import path is called with the config.

    Token files: sizes, sidecar and document offsets are read, tokens as `verify` says. Raises DataError for files that are not what they
    should be, ValueError for an import path that leads nowhere.
    Usage: `open_source(SourceConfig(name="tokens", path="tokens/books"))`.
    """
    if config.name == "builtin":
        return BuiltinCorpus(config.split)
    if config.name == "tokens":
        assert config.path is not None  # a rule of SourceConfig
        return TokenFiles(config.path, config.dtype, config.split, config.verify)
    return _from_import_path(config)


def _from_import_path(config: SourceConfig) -> Source:
    module, _, attribute = config.name.partition(":")
    try:
        factory: Any = importlib.import_module(module)
        for part in attribute.split("."):
            factory = getattr(factory, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"source name {config.name!r} must be importable ({error}); "
            "check the spelling and that the module is on the Python path"
        ) from error
    source = factory(config)
    missing = [name for name in _MEMBERS if not hasattr(source, name)]
    if missing:
        raise ValueError(
            f"source {config.name!r} must offer {', '.join(_MEMBERS)}, but lacks "
            f"{', '.join(missing)}; add them"
        )
    return source
