# Copied from scripts/shared/tokenizer_settings.py; edit that file, then run scripts/copy_shared.py.
"""Settings that a tokenizer file may hold, and that must not act on text for training."""

from __future__ import annotations

from typing import Any


def switch_off_settings(tokenizer: Any) -> None:
    """Turn off truncation, padding and BPE dropout of a tokenizer of the tokenizers library, in place.

    They would truncate documents, pad them, and make each run of `prepare` different.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None) is not None:
        tokenizer.model.dropout = None
