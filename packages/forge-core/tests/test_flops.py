"""Counts against hand-made sums."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from forge_core import Transformer, TransformerConfig
from forge_core.flops import flops_per_token, parameter_count, peak_flops
from forge_core.lora import LoRAConfig, lora
from forge_core.model import MLAConfig, MTPConfig
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")


class Offers(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def flops_per_token(self, seq_len):
        return 100 * seq_len


def test_parameters_are_unique():
    first, second = nn.Linear(3, 5), nn.Linear(3, 5)
    second.weight = first.weight
    assert parameter_count(nn.Sequential(first, second)) == 15 + 5 + 5


def test_linears_are_counted_forward_and_backward():
    model = nn.Sequential(nn.Embedding(100, 4), nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    assert flops_per_token(model, 16) == 3 * 2 * (4 * 8 + 8 * 2)


def test_a_module_that_offers_its_count_is_not_looked_into():
    model = nn.Sequential(Offers(), nn.Linear(2, 3))
    assert flops_per_token(model, 16) == 3 * (1600 + 2 * 6)


def test_F40_the_formula_of_a_dense_decoder():
    """Matrices and half of the attention square; the embedding lookup is not arithmetic."""
    dim, heads, kv_heads, head_dim, hidden, vocab, layers, seq = 16, 4, 2, 4, 24, 50, 3, 32
    sizes = {"vocab_size": vocab, "dim": dim, "num_layers": layers, "hidden_dim": hidden}
    model = Transformer(TransformerConfig(**sizes, num_heads=heads, num_kv_heads=kv_heads))
    matrices = dim * head_dim * (2 * heads + 2 * kv_heads) + 3 * dim * hidden
    attention = 2 * heads * head_dim * seq
    assert flops_per_token(model, seq) == 3 * (
        layers * (2 * matrices + attention) + 2 * dim * vocab
    )


def test_seq_len_must_be_positive():
    with rejects("seq_len", 0, "range"):
        flops_per_token(nn.Linear(2, 2), 0)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.5e12),
        ("NVIDIA H100 80GB HBM3", 989.5e12),
        ("NVIDIA H100 PCIe", 756.5e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("Some Card", None),
    ],
)
def test_peaks_by_name(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda"), torch.bfloat16) == peak
    assert peak_flops(torch.device("cuda"), torch.float32) is None


def test_a_cpu_has_no_known_peak():
    assert peak_flops(torch.device("cpu"), torch.bfloat16) is None


def test_weights_that_are_frozen_get_no_gradient():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 6), nn.Linear(6, 3))
    whole = flops_per_token(model, 8)
    model[0].requires_grad_(False)  # a table is looked up
    assert flops_per_token(model, 8) == whole == 3 * 2 * (4 * 6 + 6 * 3)
    model[1].weight.requires_grad_(False)
    assert flops_per_token(model, 8) == whole - 2 * 4 * 6
    lora(model, LoRAConfig(("2",), rank=2))
    assert flops_per_token(model, 8) == 2 * 2 * (4 * 6 + 6 * 3) + 3 * 2 * 2 * (6 + 3)


def counted(model: nn.Module, **extras: torch.Tensor) -> float:
    """Operations of a forward for each of 8 tokens, as torch counts its matmuls."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, 8, dtype=torch.int64), **extras)
    return counter.get_total_flops() / 8


@pytest.mark.parametrize(
    ("options", "excluded"),
    [
        ({}, ()),
        ({"feed_forward": "gelu", "qkv_bias": True}, ()),
        ({"mixer": "mla", "mla": MLAConfig(4, 4, 4, 2, 4)}, ("!*.kv_b_proj",)),
        ({"mtp": MTPConfig(num_modules=1)}, ()),
    ],
)
def test_F153_adapters_are_counted(options: dict, excluded: tuple[str, ...]) -> None:
    config = TransformerConfig(vocab_size=16, dim=8, num_layers=2, num_heads=2, **options)
    model = Transformer(config)
    ahead = {"next_tokens": torch.zeros(1, 1, 8, dtype=torch.int64)} if "mtp" in options else {}
    plain, formula = counted(model, **ahead), model.flops_per_token(8)
    names = lora(model, LoRAConfig(("*_proj", *excluded, *(["*.join"] if ahead else [])), rank=3))
    assert names
    assert model.flops_per_token(8) - formula == counted(model, **ahead) - plain > 0


def test_F177_matrices_that_no_module_counts_are_named():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.weight = nn.Linear(3, 4), nn.Parameter(torch.zeros(3, 4))

    with pytest.warns(UserWarning, match=r"^Own .*flops_per_token"):
        assert flops_per_token(nn.Sequential(Own()), 7) == 3 * 2 * 12
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for counted in (nn.Linear(3, 4), nn.Embedding(3, 4), nn.LayerNorm(3)):
            flops_per_token(nn.Sequential(counted), 7)
