"""Text generation: one prefill, then one token at a time from the KV cache.

Shapes: B sequences, S prompt tokens (the longest of the batch), N new tokens, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from forge_core._shared.fields import field
from forge_core._shared.modes import evaluation_mode
from forge_core._shared.problems import Problem, invalid, raise_problems

__all__ = ["SamplingConfig", "generate", "generate_stream", "generate_text"]

Prompts = Tensor | Sequence[Sequence[int]] | Sequence[Tensor]
Ends = int | Sequence[int] | None


@dataclass(frozen=True)
class SamplingConfig:
    """How the next token is drawn: repetition penalty, temperature, then top-k, top-p and min-p.

    SamplingConfig(temperature=0.0)             # greedy
    SamplingConfig(temperature=0.8, top_p=0.95)
    """

    temperature: float = field(1.0, "divides the logits; 0 takes the likeliest token")
    top_k: int | None = field(None, "draw from the k likeliest tokens only")
    top_p: float | None = field(None, "draw from the likeliest tokens that hold this probability")
    min_p: float | None = field(
        None, "draw from tokens with at least this fraction of the likeliest one's probability"
    )
    repetition_penalty: float = field(
        1.0, "logits of tokens that the sequence holds are divided by it, negative ones multiplied"
    )
    seed: int = field(0, "each sequence draws from its own stream of (seed, its number)")

    def __post_init__(self) -> None:
        raise_problems("sampling", _sampling_problems(self))


def _sampling_problems(c: SamplingConfig) -> Iterator[Problem]:
    if not 0.0 <= c.temperature < float("inf"):
        rule = "must be a finite number, 0 or more"
        yield Problem("temperature", "range", c.temperature, rule, "use 1, or 0 for greedy")
    if c.top_k is not None and c.top_k < 1:
        fix = "use 1 or more, or leave it out"
        yield Problem("top_k", "range", c.top_k, "must be at least 1", fix)
    for name, value, example in (("top_p", c.top_p, 0.9), ("min_p", c.min_p, 0.05)):
        if value is not None and not 0.0 < value <= 1.0:
            rule = "must be above 0 and at most 1"
            yield Problem(name, "range", value, rule, f"use {example}, or leave it out")
    if not 0.0 < c.repetition_penalty < float("inf"):
        rule, value = "must be a finite number above 0", c.repetition_penalty
        yield Problem("repetition_penalty", "range", value, rule, "use 1.1, or 1 for none")


def generate(
    model: nn.Module,
    tokens: Prompts,
    max_new_tokens: int,
    sampling: SamplingConfig = SamplingConfig(),
    eos_id: Ends = None,
    prefill_chunk: int | None = None,
    first_row: int = 0,
    extras: Mapping[str, Any] | None = None,
) -> Tensor:
    """Generate tokens (B, N) int64 after prompts; N is below `max_new_tokens` if every sequence met an `eos_id`.

        generate(model, [[1, 2, 3], [4]], 20, SamplingConfig(temperature=0.0))

    The columns are those of `generate_stream`, and so are the arguments.
    """
    rest = (sampling, eos_id, prefill_chunk, first_row, extras)
    return torch.stack(list(generate_stream(model, tokens, max_new_tokens, *rest)), dim=1)


def generate_stream(
    model: nn.Module,
    tokens: Prompts,
    max_new_tokens: int,
    sampling: SamplingConfig = SamplingConfig(),
    eos_id: Ends = None,
    prefill_chunk: int | None = None,
    first_row: int = 0,
    extras: Mapping[str, Any] | None = None,
) -> Iterator[Tensor]:
    """Yield the new tokens of all sequences, (B,) int64, one step at a time.

    tokens: (B, S) int64 or a sequence of prompts of any lengths; they go to the model's device.
    eos_id: one id or several. A sequence that produced one repeats it; when all have, the stream ends. None never
    stops, and 0 is an id like any other.
    prefill_chunk: prompt tokens per forward; the activations of a long prompt are then those of a chunk.
    first_row: sequences draw as number `first_row`, `first_row + 1`, ... of a larger batch would.
    extras: further keywords of the model's forward (images) for the prompts, which are then fed in one call.

    Sequences are independent: the tokens of one do not depend on the others nor on their number. `model` is called
    `model(tokens, document_ids=..., cache=..., last_only=True)` in eval mode, which is undone when the stream ends or
    is closed.

    Raises ValueError before anything runs: an empty prompt, max_new_tokens or prefill_chunk below 1, prompt and
    new tokens longer than `model.config.max_seq_len`.
    Cost: the prompts once, then one token a step, and a host sync a step if `eos_id` is given; a repetition penalty
    holds (B, V) booleans.
    """
    device = next(model.parameters()).device
    prompts, document_ids = _pad_left(tokens, device)
    size = prompts.size(1)
    longest: int | None = getattr(getattr(model, "config", None), "max_seq_len", None)
    for name, count, fix in (
        ("max_new_tokens", max_new_tokens, "ask for one or more"),
        ("prefill_chunk", prefill_chunk, "use 2048, or leave it out"),
    ):
        if count is not None and count < 1:
            raise invalid(name, "range", count, "must be at least 1", fix)

    if longest is not None and size >= longest:
        rule = f"has a prompt of {size} tokens, which fills max_seq_len {longest}"
        raise invalid("tokens", "length", tuple(prompts.shape), rule, "shorten it")
    if longest is not None and size + max_new_tokens > longest:
        rule = f"and a prompt of {size} tokens are longer than max_seq_len {longest}"
        fix = f"ask for {longest - size} or fewer, or shorten the prompt"
        raise invalid("max_new_tokens", "length", max_new_tokens, rule, fix)
    if extras and prefill_chunk is not None:
        rule = f"must be left out with extras {', '.join(extras)}, which belong to full prompts"
        raise invalid("prefill_chunk", "excludes", prefill_chunk, rule)

    ids = [eos_id] if isinstance(eos_id, int) else [] if eos_id is None else list(eos_id)
    ends = torch.tensor(ids).to(device, non_blocking=True) if ids else None
    draws = _Draws(sampling.seed, prompts.size(0), device, first_row)
    chunk, given = prefill_chunk or size, extras or {}
    return _generate_steps(
        model, prompts, document_ids, max_new_tokens, sampling, ends, chunk, draws, given
    )


def generate_text(
    model: nn.Module,
    tokenizer: Any,
    ids: Sequence[int],
    max_new_tokens: int,
    sampling: SamplingConfig = SamplingConfig(),
    prefill_chunk: int | None = None,
) -> Iterator[str]:
    """Yield the text after a prompt of token ids as it grows, up to an end token or `max_new_tokens`.

    `tokenizer` has `decode(ids)`, `end_ids` and `vocab_size`; ids beyond that are U+FFFD. Raises as `generate_stream`,
    before the first text. Cost: one host sync a token.
    """
    # without `eos_id`, for which `generate_stream` would read each token a second time
    stream = generate_stream(model, [ids], max_new_tokens, sampling, prefill_chunk=prefill_chunk)
    return _decoded(stream, tokenizer)


def _decoded(stream: Iterator[Tensor], tokenizer: Any) -> Iterator[str]:
    """Yield each completed text of a stream of tokens (1,)."""
    shown, new = tokenizer.decode([]), []
    for step in stream:
        token = int(step[0])
        if token in tokenizer.end_ids:
            break
        if token >= tokenizer.vocab_size:  # the model has more ids than the tokenizer has texts
            yield "\N{REPLACEMENT CHARACTER}"
            continue
        new.append(token)
        text = tokenizer.decode(new)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):  # the middle of a character
            continue
        yield text[len(shown) :]
        shown = text


def _generate_steps(
    model: nn.Module,
    tokens: Tensor,
    document_ids: Tensor | None,
    max_new_tokens: int,
    sampling: SamplingConfig,
    ends: Tensor | None,
    chunk: int,
    draws: _Draws,
    extras: Mapping[str, Any],
) -> Iterator[Tensor]:
    """Run the model `max_new_tokens` times; tokens (B, S) are the prompts, then the last tokens (B, 1)."""
    finished = torch.zeros(tokens.size(0), dtype=torch.bool, device=tokens.device)
    cache = seen = None
    with evaluation_mode(model):
        for _ in range(max_new_tokens):
            # Not across a yield: it would leak into the caller's code. And no inference mode: there
            # `reshape` reaches tensor subclasses undecomposed, and torchao's rowwise float8 raises.
            with torch.no_grad():
                if cache is None:
                    cache = model.new_cache(tokens.size(1) + max_new_tokens)  # type: ignore[operator]
                    logits = _prefill(model, tokens, document_ids, cache, chunk, extras)  # (B, V)
                    if sampling.repetition_penalty != 1.0:
                        seen = _ids_in(tokens, document_ids, logits)
                else:
                    logits = model(tokens, cache=cache, last_only=True)[:, -1]  # (B, V)

                if seen is not None:
                    logits = _penalize(logits, seen, sampling.repetition_penalty)
                chosen = sample(logits, sampling, draws)
                if seen is not None:
                    seen.scatter_(1, chosen.unsqueeze(1), True)
                if ends is not None:
                    # the previous token; in the first step it is of the prompt, and no sequence is finished then
                    chosen = torch.where(finished, tokens[:, -1], chosen)
                    finished = finished | (chosen.unsqueeze(1) == ends).any(1)
                tokens = chosen.unsqueeze(1)  # (B, 1)
            yield chosen.clone()
            if ends is not None and bool(finished.all()):
                return


def _prefill(
    model: nn.Module,
    tokens: Tensor,
    document_ids: Tensor | None,
    cache: object,
    chunk: int,
    extras: Mapping[str, Any],
) -> Tensor:
    """Feed the prompts (B, S) to the cache, `chunk` tokens at a time; return the logits after the last (B, V)."""
    for start in range(0, tokens.size(1), chunk):
        new = slice(start, start + chunk)
        ids = None if document_ids is None else document_ids[:, new]
        logits = model(tokens[:, new], document_ids=ids, cache=cache, last_only=True, **extras)
    return logits[:, -1]


def _ids_in(tokens: Tensor, document_ids: Tensor | None, logits: Tensor) -> Tensor:
    """Ids in each prompt, without padding: (B, V) bool."""
    seen = torch.zeros_like(logits, dtype=torch.bool)
    if document_ids is None:
        return seen.scatter_(1, tokens, True)
    counts = torch.zeros_like(logits, dtype=torch.int32)
    held = (document_ids >= 0).to(tokens.device, torch.int32)
    return counts.scatter_add_(1, tokens, held) > 0


def _penalize(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make ids that a sequence holds less likely (Keskar et al. 2019): (B, V), like logits."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


class _Draws:
    """Uniform numbers of each sequence from its own generator of (seed, number), one copy to the device in 256 steps."""

    _CHUNK = 256

    def __init__(self, seed: int, batch: int, device: torch.device, first_row: int = 0) -> None:
        self.device = device
        self.generators = []
        for number in range(first_row, first_row + batch):
            digest = hashlib.sha256(f"{seed}:{number}".encode()).digest()
            generator = torch.Generator("cpu")
            self.generators.append(generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1))
        self.used = self._CHUNK
        self.chunk = torch.empty(0)

    def next(self) -> Tensor:
        """Return the next number of every sequence, (B, 1) in [0, 1)."""
        if self.used == self._CHUNK:
            # on the CPU, so that every device generates the same tokens
            drawn = [torch.rand(self._CHUNK, generator=g, device="cpu") for g in self.generators]
            self.chunk, self.used = torch.stack(drawn).to(self.device), 0
        self.used += 1
        return self.chunk[:, self.used - 1 : self.used]


def sample(logits: Tensor, sampling: SamplingConfig, draws: _Draws) -> Tensor:
    """Draw one token id for each row of logits (B, V) -> (B,) int64."""
    if sampling.temperature == 0.0:
        return logits.argmax(dim=-1)
    cumulative, ids = candidates(logits, sampling)
    target = draws.next() * cumulative[:, -1:]
    # The first token whose cumulative probability is above the draw; rounding stays inside.
    index = torch.searchsorted(cumulative, target, right=True)
    last = (cumulative < cumulative[:, -1:]).sum(dim=-1, keepdim=True)
    return ids.gather(1, index.minimum(last)).squeeze(1)


def candidates(logits: Tensor, sampling: SamplingConfig) -> tuple[Tensor, Tensor]:
    """Cumulative weights of the tokens to draw from, the likeliest first, and their ids: (B, V or top_k) each.

    A token that is left out adds nothing to the sum; the last entry is the total, which need not be 1.
    """
    # stable: equal logits keep the order of ids, on every device
    values, ids = (logits.float() / sampling.temperature).sort(descending=True, stable=True)
    if sampling.top_k is not None:
        values, ids = values[:, : sampling.top_k], ids[:, : sampling.top_k]
    probabilities = values.softmax(dim=-1)  # (B, V or top_k)
    kept = probabilities
    if sampling.top_p is not None:
        # The smallest set with a probability of top_p: tokens before which less than top_p is summed.
        before = probabilities.cumsum(dim=-1) - probabilities
        kept = kept * (before < sampling.top_p)
    if sampling.min_p is not None:
        kept = kept * (probabilities >= sampling.min_p * probabilities[:, :1])
    # the likeliest token stays, whatever top_p and min_p are
    kept[:, 0] = probabilities[:, 0]
    return kept.cumsum(dim=-1), ids


def _pad_left(tokens: Prompts, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Prompts as (B, S) with padding on the left, and document ids: -1 on padding, 0 on the prompt.

    The ids stay on the CPU (no sync to read them) and are None without padding.
    """
    if isinstance(tokens, Tensor):
        if tokens.dim() != 2:
            fix = "add a dim for one sequence"
            raise invalid("tokens", "shape", tuple(tokens.shape), "must be (B, S)", fix)
        prompts = list(tokens)
    else:
        prompts = [torch.as_tensor(prompt, dtype=torch.int64) for prompt in tokens]
    if not prompts or min(prompt.numel() for prompt in prompts) == 0:
        raise invalid("tokens", "empty", ..., "must not be empty", "begin a prompt with one token")

    # on the left, so that the last column holds the last token of every prompt
    longest = max(prompt.numel() for prompt in prompts)
    padded = torch.zeros(len(prompts), longest, dtype=torch.int64, device=device)
    ids = torch.full((len(prompts), longest), -1, device="cpu")
    for number, prompt in enumerate(prompts):
        padded[number, longest - prompt.numel() :] = prompt.to(device, non_blocking=True)
        ids[number, longest - prompt.numel() :] = 0
    return padded, (None if bool((ids == 0).all()) else ids)
