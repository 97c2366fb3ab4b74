"""Token files, packing and a resumable global order of training data."""

from forge_data import _renamed as _renamed
from forge_data.batch import Batch, Ragged, filler_batch
from forge_data.collate import batch_of
from forge_data.config import DataConfig, SourceConfig, TrainingSourceConfig
from forge_data.errors import InvalidData
from forge_data.loader import Loader
from forge_data.order import Permutation
from forge_data.packing import PackedStream
from forge_data.phases import PhaseConfig
from forge_data.protocols import Source, Stream, Tokenizer
from forge_data.sources.builtin import BuiltinCorpus
from forge_data.sources.open import open_header, open_source, open_stream, open_training
from forge_data.tokenizer import ByteTokenizer, JsonTokenizer, load_tokenizer
from forge_data.tokens.files import TokenFiles, verify

__all__ = [
    "Batch",
    "BuiltinCorpus",
    "ByteTokenizer",
    "DataConfig",
    "InvalidData",
    "JsonTokenizer",
    "Loader",
    "PackedStream",
    "Permutation",
    "PhaseConfig",
    "Ragged",
    "Source",
    "SourceConfig",
    "Stream",
    "TokenFiles",
    "Tokenizer",
    "TrainingSourceConfig",
    "batch_of",
    "filler_batch",
    "load_tokenizer",
    "open_header",
    "open_source",
    "open_stream",
    "open_training",
    "verify",
]
