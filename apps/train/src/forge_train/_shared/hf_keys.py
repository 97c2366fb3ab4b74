# Copied from scripts/shared/hf_keys.py; edit that file, then run scripts/copy_shared.py.
"""Keys of a Hugging Face `config.json` that change no logits of a model in eval mode, in any family."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

_HARMLESS = """
_attn_implementation _attn_implementation_autoset _commit_hash _name_or_path add_cross_attention
architectures attn_implementation auto_map bad_words_ids begin_suppress_tokens bos_token_id
chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty
do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id
exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id id2label
is_decoder is_encoder_decoder is_llama_config label2id length_penalty max_length min_length
no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences output_attentions
output_hidden_states output_scores pad_token_id prefix pretraining_tp problem_type pruned_heads
remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id
suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class
top_k top_p torch_dtype torchscript transformers_version typical_p unk_token_id unsloth_fixed
unsloth_version use_bfloat16 use_cache
"""
#: Keys that transformers 4 and 5 write into every config.json, and further ones in files of known families.
HARMLESS = frozenset(_HARMLESS.split())

_TRAINING = """
activation_dropout attention_dropout attention_probs_dropout_prob attn_pdrop classifier_dropout dropout
drop_path_rate embd_dropout embd_pdrop embedding_dropout ffn_dropout hidden_dropout hidden_dropout_prob layerdrop
mlp_dropout projection_dropout resid_dropout resid_pdrop residual_dropout router_jitter_noise
"""
#: Rates of dropout and of noise, which act in training only.
TRAINING = frozenset(_TRAINING.split())


def training_rates(
    hf: Mapping[str, Any], tables: Iterable[str] = ("text_config",)
) -> dict[str, Any]:
    """Rates of the model, and of `tables` in it, that are not 0, by dotted key: training without them differs."""
    found = {key: value for key, value in hf.items() if key in TRAINING and value}
    for name in tables:
        if isinstance(table := hf.get(name), Mapping):
            found |= {f"{name}.{key}": value for key, value in training_rates(table, ()).items()}
    return found


def is_rate(value: Any) -> bool:
    """Whether the value of a key of `TRAINING` is a finite number from 0 on."""
    return type(value) in (int, float) and math.isfinite(value) and value >= 0
