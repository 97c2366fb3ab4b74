"""Folders of transformers and rows of families, for the tests that compare the two models."""

import json

import pytest


def saved(model, folder):
    """config.json of a model of transformers, and its weights by their names on disk."""
    safetensors = pytest.importorskip("safetensors.torch")
    model.save_pretrained(folder)
    return (
        json.loads((folder / "config.json").read_text()),
        safetensors.load_file(folder / "model.safetensors"),
    )


def renamed(rows, tensors, layers, back=False):
    """Tensors by the other side's names; the rows of these models only rename."""
    names = {}
    for hf, ours, _ in rows:
        for layer in range(layers):
            pair = (hf.replace("{i}", str(layer)), ours.replace("{i}", str(layer)))
            names[pair[back]] = pair[not back]
    return {names[name]: value for name, value in tensors.items()}


def distance(a, b):
    """max|a - b| / max|b|."""
    return float((a - b).abs().max() / b.abs().max())
