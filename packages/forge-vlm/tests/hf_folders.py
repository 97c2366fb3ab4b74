"""Folders of transformers and rows of families, for the tests that compare the two models."""

import json

import pytest
import torch

from forge_core import cross_entropy
from forge_vlm import VLM


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


def ours_of(theirs, folder, family):
    """The model of Forge with the weights of a model of transformers, saved to `folder`."""
    hf, tensors = saved(theirs, folder)
    config = family.config_from_hf(hf)
    model = VLM(config)
    model.load_state_dict(renamed(family.rows_of(config), tensors, config.num_layers))
    return model


def labels_of(tokens, image):
    """(labels of Forge, which are shifted; labels of transformers); image tokens have none."""
    given = torch.where(tokens == image, -100, tokens)
    labels = torch.full_like(tokens, -100)
    labels[:, :-1] = given[:, 1:]
    return labels, given


def assert_trains_alike(ours, theirs, tokens, image, own, others, steps=20):
    """AdamW trains both: the losses are equal in each step, and the logits in the end.

    own, others: keyword arguments of each forward next to tokens and labels.
    """
    labels, given = labels_of(tokens, image)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-4) for m in (ours, theirs)]
    for _ in range(steps):
        found = cross_entropy(ours(tokens, **own), labels).mean
        wanted = theirs(input_ids=tokens, labels=given, **others).loss
        assert abs(float(found.detach() - wanted.detach())) < 1e-5 * float(wanted.detach())
        for loss, optimizer in zip((found, wanted), optimizers):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        logits = theirs(input_ids=tokens, **others).logits
        assert distance(ours(tokens, **own), logits) < 1e-5


def assert_same_logits(ours, theirs, tokens, images):
    """Logits are equal, and depend on the images."""
    with torch.no_grad():
        wanted = theirs(input_ids=tokens, pixel_values=images).logits
        found, other = ours(tokens, images=images), ours(tokens, images=images.flip(0))
    assert distance(found, wanted) < 1e-5
    assert distance(other, wanted) > 1e-3


def distance(a, b):
    """max|a - b| / max|b|."""
    return float((a - b).abs().max() / b.abs().max())
