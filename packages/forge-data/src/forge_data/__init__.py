"""Token files, packing and a resumable global order of training data.

The modules `documents` and `prepare` are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from forge_data import _renamed as _renamed
from forge_data.batch import Batch, Ragged, filler_batch
from forge_data.collate import batch_of
from forge_data.config import DataConfig, SourceConfig, TrainingSourceConfig
from forge_data.errors import InvalidData
from forge_data.kinds import ChatConfig, TextConfig
from forge_data.loader import Loader
from forge_data.order import Permutation
from forge_data.packing import PackedStream
from forge_data.packing_config import PackingConfig
from forge_data.phases import PhaseConfig
from forge_data.protocols import Source, Stream, Tokenizer
from forge_data.sources.builtin import BuiltinCorpus
from forge_data.sources.open import open_header, open_source, open_stream, open_training
from forge_data.tokenizer import ByteTokenizer, JsonTokenizer, load_tokenizer
from forge_data.tokens.files import TokenFiles, verify

if TYPE_CHECKING:
    from forge_data import documents, prepare

__all__ = [
    "Batch",
    "BuiltinCorpus",
    "ByteTokenizer",
    "ChatConfig",
    "DataConfig",
    "InvalidData",
    "JsonTokenizer",
    "Loader",
    "PackedStream",
    "PackingConfig",
    "Permutation",
    "PhaseConfig",
    "Ragged",
    "Source",
    "SourceConfig",
    "Stream",
    "TextConfig",
    "TokenFiles",
    "Tokenizer",
    "TrainingSourceConfig",
    "batch_of",
    "documents",
    "filler_batch",
    "load_tokenizer",
    "open_header",
    "open_source",
    "open_stream",
    "open_training",
    "prepare",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
