"""A model of lmms_eval, with images: `lmms_eval --model forge --model_args path=runs/mine --tasks TASK`.

Needs lmms_eval, 0.7.3 or newer, which is not an extra of this package: it pins much, so give it an environment of its own.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from lmms_eval.api.model import lmms
from lmms_eval.models.registry_v2 import ModelManifest

from forge_core import SamplingConfig
from forge_lab._shared.problems import invalid
from forge_lab.text import load_with_images, task_options, truncate
from forge_parallel import select_device
from forge_vlm.answers import answer_all, media_on
from forge_vlm.data import ChatSegment, EncodedImage, Message, Prompt, Record

__all__ = ["Forge", "manifest"]

_MARK = "<image>"
_NEW_TOKENS = 128  # of tasks that set no number


class Forge(lmms):  # type: ignore[misc, unused-ignore]
    """The newest good checkpoint of a run, or a folder of Hugging Face, as `forge-train generate` opens them.

        Forge("runs/mine", batch_size=8).generate_until(requests)

    A question is a user's message in the model's own template: its text with images at `<image>`, or before it where
    there are no such marks. NotImplementedError for video and for several rounds.
    """

    is_simple = True

    def __init__(
        self, path: str, batch_size: int | str = 8, device: str | None = None, **other: Any
    ) -> None:
        super().__init__()
        given = {key: value for key, value in other.items() if value is not None}
        given.pop("max_batch_size", None)
        if given:
            raise invalid("model_args", "unknown_key", [*given], "are not arguments", "give path")
        self._batch_size = int(batch_size)
        self._model, self._prompts = load_with_images(path, select_device(device or "auto"))

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Answers, greedy unless the task asks for a temperature, up to the first of its `until`."""
        found: list[str] = []
        for options, group in groupby(requests, key=lambda request: dict(request.args[1])):
            args = [request.args for request in group]
            asked = [self._prompt(context, *where) for context, _, *where in args]
            new = int(options.get("max_new_tokens", _NEW_TOKENS))
            temperature, ends = task_options(options)
            sampling = SamplingConfig(temperature=temperature)
            texts = answer_all(self._model, self._prompts, asked, new, sampling, self._batch_size)
            found += [truncate(text, ends) for text in texts]
        return found

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """(log-probability of a continuation, whether greedy decoding writes it), one forward each."""
        found = []
        for request in requests:
            context, target, *where = request.args
            doc = self._doc(*where[1:])
            continuation = target(doc) if callable(target) else str(target)
            prompt = self._prompt(context, *where)
            ids = self._prompts.tokens.encode([ChatSegment(continuation)])[0]
            found.append(self._score(prompt, torch.from_numpy(ids)))
        return found

    def generate_until_multi_round(self, requests: Sequence[Any]) -> list[str]:
        """Raise NotImplementedError."""
        raise NotImplementedError("tasks of several rounds are not asked; use one of one question")

    @torch.no_grad()
    def _score(self, prompt: Prompt, ids: torch.Tensor) -> tuple[float, bool]:
        device = next(self._model.parameters()).device
        tokens = torch.cat([torch.from_numpy(prompt.tokens), ids])[None].to(device)  # (1, S)
        media = media_on(self._model, self._prompts.media([prompt]))
        logits = self._model(tokens, **media)[0, len(prompt.tokens) - 1 : -1]  # (N, V)
        ids = ids.to(device)
        chosen = logits.float().log_softmax(-1).gather(1, ids[:, None])
        return float(chosen.sum()), bool((logits.argmax(-1) == ids).all())

    def _doc(self, number: Any, task: str, split: str) -> Any:
        return self.task_dict[task][split][number]

    def _prompt(
        self, context: str, visuals: Callable[[Any], Any], number: Any, task: str, split: str
    ) -> Prompt:
        """The prompt of a question about a document of a task."""
        images = list(visuals(self._doc(number, task, split)) or ())
        name = f"{task}, {split} {number}"
        pictures = tuple(_picture(f"{name}, picture {i}", image) for i, image in enumerate(images))

        texts = context.split(_MARK)
        if len(texts) - 1 != len(images):
            texts = [*[""] * len(images), context]
        content: list[str | int] = [texts[0]]  # texts, and indices of images
        for i, text in enumerate(texts[1:]):
            content += [i, text]
        message = Message("user", tuple(item for item in content if item != ""))
        return self._prompts(Record(name, (message,), pictures))


def _picture(name: str, image: Any) -> EncodedImage:
    if not hasattr(image, "save"):
        raise NotImplementedError(f"{name} is no picture of pillow; videos and sound are not read")
    file = io.BytesIO()
    image.convert("RGB").save(file, "PNG")
    return EncodedImage(name, file.getvalue())


def manifest() -> ModelManifest:
    """The entry point `forge` of lmms_eval.models."""
    return ModelManifest("forge", simple_class_path=f"{__name__}.{Forge.__name__}")
