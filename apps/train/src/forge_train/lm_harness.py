"""A text model as lm_eval (lm-evaluation-harness) asks one: on run directories, without an export.

    import lm_eval
    from forge_train.lm_harness import Forge

    lm_eval.simple_evaluate(model=Forge("runs/mine"), tasks=["my_task"])

Needs lm_eval, 0.4.13 or newer, which is no extra of this package. One process computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch.nn.utils.rnn import pad_sequence

from forge_core import SamplingConfig, generate
from forge_parallel import select_device
from forge_train.errors import ConfigError
from forge_train.jobs import load_folder, load_trained
from forge_train.trainer.run_directory import RunDirectory

__all__ = ["Forge"]

_NEW_TOKENS = 256  # of tasks that do not say


@register_model("forge")
class Forge(TemplateLM):  # type: ignore[misc, unused-ignore]
    """The newest good checkpoint of a run, or a folder of Hugging Face, with fp32 weights.

        Forge("runs/mine", batch_size=8).loglikelihood(requests)

    A context that is longer than the model's rows loses its beginning. A request without a context stands behind the end
    of a document, as rows of training do; ConfigError where the tokenizer has none.
    """

    def __init__(self, path: str, batch_size: int | str = 8, device: str | None = None) -> None:
        super().__init__()
        where, folder = select_device(device or "auto"), Path(path)
        if (folder / "config.json").is_file() and not RunDirectory(folder).config.exists():
            self._model, self._tokens = load_folder(folder, where)
        else:
            self._model, self._tokens, _ = load_trained(folder, where)
        self.path, self.batch_size = str(path), int(batch_size)
        self.max_length: int = getattr(getattr(self._model, "config", None), "max_seq_len", 2048)

    @property
    def eot_token_id(self) -> int:
        """The id behind the end of a document."""
        if self._tokens.eos_id is None:
            raise ConfigError(
                [
                    f"the tokenizer of {self.path} has no end of a document, behind which a text without context would "
                    "stand; use tasks with contexts"
                ]
            )
        return self._tokens.eos_id

    @property
    def tokenizer_name(self) -> str:
        """What caches of lm_eval know the tokenizer by."""
        return self._tokens.fingerprint

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Ids of a text; none are added."""
        return list(self._tokens.encode(string))

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """(log-probability of the continuation, whether greedy decoding writes it) of each (_, context, continuation)."""
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1] + requests[i][2]))
        found: dict[int, tuple[float, bool]] = {}
        for first in range(0, len(order), self.batch_size):
            part = order[first : first + self.batch_size]
            found |= zip(part, self._score([requests[i][1:] for i in part]))
        return [found[i] for i in range(len(requests))]

    @torch.no_grad()
    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> Iterator[tuple[float, bool]]:
        # the last token is only predicted, so a row takes one more than the model's length
        rows = [torch.tensor((context + ids)[-(self.max_length + 1) :]) for context, ids in pairs]
        tokens = pad_sequence([row[:-1] for row in rows], batch_first=True)  # (B, S)
        lengths = torch.tensor([len(row) - 1 for row in rows])
        filled = torch.arange(tokens.size(1)) >= lengths[:, None]
        device = next(self._model.parameters()).device
        documents = torch.where(filled, -1, 0)  # filler is a document of its own
        logits = self._model(tokens.to(device), document_ids=documents)  # (B, S, V)
        for row, (_, ids), own in zip(rows, pairs, logits):
            n = min(len(ids), len(row) - 1)
            logs = own[len(row) - 1 - n : len(row) - 1].float().log_softmax(-1)  # (N, V)
            wanted = row[-n:].to(device)
            chosen = logs.gather(1, wanted[:, None])
            yield float(chosen.sum()), bool((logs.argmax(-1) == wanted).all())

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-probability of whole texts, in windows of the model's rows, each token once."""
        found = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, self.max_length, 1
            )
            parts = [(None, *make_disjoint_window(window)) for window in windows]
            found.append(sum(value for value, _ in self._loglikelihood_tokens(parts)))
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts, greedy unless the task asks for a temperature, up to the first of its `until`."""
        return [self._continue(*request.args) for request in requests]

    def _continue(self, context: str, options: dict[str, Any]) -> str:
        new = int(options.get("max_gen_toks", _NEW_TOKENS))
        if new >= self.max_length:
            raise ConfigError(
                [
                    f"max_gen_toks {new} must be below the model's max_seq_len {self.max_length}; lower it"
                ]
            )
        prompt = (self.tok_encode(context) or [self.eot_token_id])[-(self.max_length - new) :]
        hot = float(options.get("temperature") or 0) if options.get("do_sample") else 0.0
        sampling = SamplingConfig(temperature=hot)
        ids = generate(self._model, [prompt], new, sampling, self._tokens.eos_id)[0].tolist()
        if self._tokens.eos_id in ids:
            ids = ids[: ids.index(self._tokens.eos_id)]
        text = self._tokens.decode(ids)
        until = options.get("until") or []
        for end in [until] if isinstance(until, str) else until:
            text = text.split(end)[0] if end else text
        return text
