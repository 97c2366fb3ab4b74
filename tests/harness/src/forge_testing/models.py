"""Parts of another author: what `module:attr` keys of the tests point to."""

from __future__ import annotations

import os
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from forge_data import SourceConfig
from forge_train import Callback


class Bigram(nn.Module):
    """Next-token logits from the last token alone."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, width)
        self.head = nn.Linear(width, vocab_size, bias=False)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.head(self.table(tokens))  # (B, S, V)


def bigram(vocab_size: int, width: int = 8) -> Bigram:
    return Bigram(vocab_size, width)


def half(vocab_size: int, width: int = 8) -> Bigram:
    """In 16 bits, as downloaded models are."""
    return Bigram(vocab_size, width).bfloat16()


class Answering(Bigram):
    """Its logits are an attribute of what it returns, as with the models of transformers."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return SimpleNamespace(logits=super().forward(*args, **kwargs), loss=None)


def answering(vocab_size: int, width: int = 8) -> Bigram:
    return Answering(vocab_size, width)


def by_rank(vocab_size: int) -> Bigram:
    """A builder that gives each rank another model."""
    model = Bigram(vocab_size, 8)
    with torch.no_grad():
        model.head.weight.fill_(float(os.environ.get("RANK", "0")))
    return model


def random_weights(vocab_size: int) -> Bigram:
    """A builder with generators of its own choice."""
    model = Bigram(vocab_size, 8)
    with torch.no_grad():
        model.head.weight.fill_(random.gauss(0, 0.1) + float(np.random.rand()))
    return model


class Alphabet:
    """A source of a thousand times the same 26 bytes."""

    vocab_size: int | None = 257
    tokenizer: dict[str, Any] | None = None
    num_tokens = 26_000
    num_documents = 1
    max_token_id = 122

    def __init__(self, config: SourceConfig, first: int = 97) -> None:
        from forge_data import open_source

        self.tokenizer = open_source(SourceConfig()).tokenizer
        self.documents = np.zeros(1, np.int64)
        self._shift, self._first = config.split == "validation", first

    def read(self, start: int, stop: int) -> np.ndarray:
        return (self._first + (np.arange(start, stop) + self._shift) % 26).astype(np.uint16)

    def fingerprint(self) -> dict[str, str | int]:
        return {"documents": "alphabet", "shift": int(self._shift)}


class PlainSGD:
    """The smallest optimizer that the runner accepts."""

    def __init__(self, model: nn.Module, config: Any) -> None:
        self.parameters = list(model.parameters())
        self.lr = config.lr

    def set_lr(self, lr: float) -> None:
        self.lr = lr

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=self.lr)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"lr": float(self.lr)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.lr = state["lr"]


class NamedSGD(PlainSGD):
    """One with momentum, which it keeps by parameter name, as a pipeline needs it."""

    def __init__(self, model: nn.Module, config: Any) -> None:
        super().__init__(model, config)
        self.momentum = {name: torch.zeros_like(p) for name, p in model.named_parameters()}

    def step(self) -> None:
        with torch.no_grad():
            for parameter, momentum in zip(self.parameters, self.momentum.values(), strict=True):
                if parameter.grad is not None:
                    momentum.mul_(0.9).add_(parameter.grad)
                    parameter.sub_(momentum, alpha=self.lr)

    def named_state(self) -> dict[str, dict[str, Any]]:
        return {name: {"momentum": momentum} for name, momentum in self.momentum.items()}

    def load_named_state(self, state: dict[str, dict[str, Any]]) -> None:
        for name, momentum in self.momentum.items():
            momentum.copy_(state[name]["momentum"])


class Counting(Callback):
    """Counts its hooks, and keeps the count in checkpoints."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}

    def _count(self, hook: str) -> None:
        self.calls[hook] = self.calls.get(hook, 0) + 1

    def on_start(self, trainer: Any) -> None:
        self._count("start")

    def on_step_end(self, trainer: Any) -> None:
        self._count("step_end")

    def on_log(self, trainer: Any, row: Any) -> None:
        self._count("log")

    def on_evaluation(self, trainer: Any, name: str, result: float) -> None:
        self._count("evaluation")

    def on_checkpoint(self, trainer: Any, step: int, path: Any) -> None:
        self._count("checkpoint")

    def on_end(self, trainer: Any) -> None:
        self._count("end")

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.calls.get("step_end", 0)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls["step_end"] = state["steps"]


class Scaled(Bigram):
    """A bigram whose buffer exists only where its constructor computed it."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size, 8)
        self.register_buffer("scale", torch.full((3,), 2.5), persistent=False)


def scaled(vocab_size: int) -> Scaled:
    return Scaled(vocab_size)
