"""A tokenizer of bytes with the marks of Idefics3 and SmolVLM, made without files."""

import pytest

SPECIAL = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]


def tokenizer_of():
    """296 ids: 256 bytes, four marks, and one for each row and column up to six."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    places = [f"<row_{r}_col_{c}>" for r in range(1, 7) for c in range(1, 7)]
    tokenizer.add_special_tokens([*SPECIAL, *places])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
