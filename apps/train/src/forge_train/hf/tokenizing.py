"""The tokenizer that an export of a run carries: that of the training data, with its chat template."""

from __future__ import annotations

from forge_data import DataConfig, SourceConfig, load_tokenizer, open_header
from forge_data.chat.template import ChatTemplate
from forge_data.tokenizer_files import TokenizerFiles
from forge_train._shared.problems import invalid
from forge_train.config.exact_match import KINDS
from forge_train.errors import ConfigError
from forge_vlm.data import Prompts


def is_talks(source: SourceConfig) -> bool:
    """Whether a source has conversations."""
    return source.name == "chat" or source.name in KINDS


def tokenizing_of(data: DataConfig, chosen: str | None) -> TokenizerFiles:
    """That of the source `chosen`, otherwise of the conversations, otherwise of the first source.

    Raises ConfigError for a source without conversations, and for conversations of several templates of which none is
    chosen; ValueError, OSError and ImportError for files and packages that are missing.
    """
    talks = {n: s for n, s in data.sources.items() if is_talks(s)}
    if chosen is not None and chosen not in talks:
        rule = f"must be a source of conversations: {', '.join(talks) or 'the run has none'}"
        raise invalid("--template", "unknown", chosen, rule, "name one", kind=ConfigError)
    if not talks:
        header = open_header(next(iter(data.sources.values())))
        return TokenizerFiles(load_tokenizer(header.tokenizer or {}))
    found = {name: _of_talks(talks[name]) for name in ([chosen] if chosen else talks)}
    first, *others = found.values()
    if any(other.identity() != first.identity() for other in others):
        rule = "is not given, and these sources write conversations differently"
        fix = (
            f"name the source whose template the export shall have: --template {next(iter(found))}"
        )
        raise invalid("--template", "several", [*found], rule, fix, kind=ConfigError)
    return first


def _of_talks(source: SourceConfig) -> TokenizerFiles:
    if source.name == "chat":
        chat = ChatTemplate(source.chat)
        return TokenizerFiles(load_tokenizer(chat.spec()), chat.template, True)
    options = {key: value for key, value in source.options.items() if key != "format"}
    prompts = Prompts.of_source(source.path or "", **options)
    return TokenizerFiles(load_tokenizer(prompts.tokens.spec or {}), prompts.jinja(), True)
