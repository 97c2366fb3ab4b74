"""Look into a model of transformers with Forge: its points, compared with transformers' own hidden states, and changed.

python examples/interp_on_hf.py                    # a small random Llama, made here
python examples/interp_on_hf.py Qwen3-0.6B         # a folder of yours
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from forge_core.interp import ActivationStore, intervene
from forge_train import load_folder

TEXT = "The quick brown fox jumps over the lazy dog."


def write_llama(folder: Path) -> None:
    """A random Llama of two layers and a tokenizer of bytes, as `save_pretrained` writes them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    config = transformers.LlamaConfig(
        vocab_size=len(alphabet), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))


@torch.no_grad()
def main(folder: Path) -> None:
    """Print the largest difference of each point from transformers, and what each head is worth."""
    model, tokenizer = load_folder(folder)
    tokens = torch.tensor([tokenizer.encode(TEXT)])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    wanted = theirs(tokens, output_hidden_states=True, output_attentions=True)
    store = ActivationStore(["layers.*.resid_pre", "layers.*.attn_weights", "final_norm"])
    with store.watch(model):
        logits = model(tokens)
    states = {name: store[name] for name in store.names if not name.endswith("attn_weights")}
    pairs = dict(zip(states, zip(states.values(), wanted.hidden_states, strict=True)))
    pairs |= {
        f"layers.{i}.attn_weights": (store[f"layers.{i}.attn_weights"], weights)
        for i, weights in enumerate(wanted.attentions)
    }
    for name, (ours, reference) in {**pairs, "logits": (logits, wanted.logits)}.items():
        difference = float((ours - reference).abs().max() / reference.abs().max())
        print(f"{name:24} {tuple(ours.shape)!s:18} differs by {difference:.1e} of its largest")
        assert difference < 1e-4
    heads = store["layers.0.attn_weights"].size(1)
    for head in range(heads):
        keep = (torch.arange(heads) != head).float()[:, None]
        with intervene(model, {"layers.0.head_out": lambda x, _, keep=keep: x * keep}):
            change = float((model(tokens) - logits).abs().max())
        print(f"without head {head} of layer 0 a logit moves by {change:.3f}")
        assert change > 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        given = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(temporary)
        if len(sys.argv) == 1:
            write_llama(given)
        main(given)
