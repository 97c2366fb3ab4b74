"""Generation: equal to full forwards, rows independent, every way to stop."""

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core import (
    AttentionSpec,
    KVCache,
    SamplingConfig,
    Transformer,
    TransformerConfig,
    generate,
    generate_stream,
    initialize,
)
from forge_core.generate import _Draws, _ids_in, _penalize, candidates, generate_text, sample
from forge_core.model.context import default_positions
from forge_testing.problems import assert_problem, rejects

pytestmark = pytest.mark.lane("test")

GREEDY = SamplingConfig(temperature=0.0)
PROMPTS = [[5, 1, 7, 30], [9], [3, 3, 8, 1, 2, 6, 4]]


def small(**options: object) -> Transformer:
    shape = {"vocab_size": 40, "dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    model = Transformer(TransformerConfig(**{**shape, "max_seq_len": 64, **options}))
    initialize(model, 3, std=0.3)
    return model


def by_full_forwards(model: Transformer, prompt: list[int], steps: int) -> list[int]:
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(steps):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.lane("quick")
@pytest.mark.parametrize("options", [{}, {"qk_norm": True, "tie_embeddings": True}])
def test_greedy_equals_full_forwards_for_32_tokens(options: dict) -> None:
    model = small(**options)
    wanted = [by_full_forwards(model, prompt, 32) for prompt in PROMPTS]
    assert generate(model, PROMPTS, 32, GREEDY).tolist() == wanted
    assert len({tuple(w) for w in wanted}) == 3


def test_a_sequence_does_not_depend_on_its_neighbors() -> None:
    model, sampling = small(), SamplingConfig(temperature=1.5, top_k=20, top_p=0.95, seed=4)
    together = generate(model, PROMPTS, 20, sampling)
    assert torch.equal(generate(model, PROMPTS[:1], 20, sampling)[0], together[0])
    assert torch.equal(generate(model, [*PROMPTS[:2], [1] * 9], 20, sampling)[:2], together[:2])
    same = generate(model, [PROMPTS[1]] * 3, 20, sampling)
    assert not torch.equal(same[0], same[1])  # each row has its own stream


def test_parts_of_a_batch_give_its_rows() -> None:
    model, sampling = small(), SamplingConfig(seed=4)
    whole = generate(model, PROMPTS, 12, sampling)
    parts = [generate(model, PROMPTS[i : i + 1], 12, sampling, first_row=i) for i in range(3)]
    assert torch.equal(torch.cat(parts), whole)


def test_seed_and_length() -> None:
    model = small()
    long = generate(model, PROMPTS, 20, SamplingConfig(seed=1))
    assert torch.equal(generate(model, PROMPTS, 20, SamplingConfig(seed=1)), long)
    assert torch.equal(generate(model, PROMPTS, 7, SamplingConfig(seed=1)), long[:, :7])
    assert not torch.equal(generate(model, PROMPTS, 20, SamplingConfig(seed=2)), long)


class Script(torch.nn.Module):
    """A model that writes a given column of tokens at each step, whatever it reads."""

    def __init__(self, columns: list[list[int]]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.columns, self.calls = columns, 0

    def new_cache(self, max_length: int) -> KVCache:
        return KVCache(max_length)

    def forward(self, tokens: Tensor, **_: object) -> Tensor:
        column = torch.tensor(self.columns[self.calls])
        self.calls += 1
        return torch.nn.functional.one_hot(column, 10).float().unsqueeze(1)


def test_F50_token_zero_is_an_eos_and_none_never_stops() -> None:
    columns = [[3, 4], [0, 5], [6, 0], [7, 7]]
    stopped, open_end = Script(columns), Script(columns)
    out = generate(stopped, [[1], [1]], 4, GREEDY, eos_id=0)
    assert out.tolist() == [[3, 0, 0], [4, 5, 0]]
    assert stopped.calls == 3  # all rows are done: no fourth forward
    assert generate(open_end, [[1], [1]], 4, GREEDY).tolist() == [[3, 0, 6, 7], [4, 5, 0, 7]]


def test_F144_each_id_of_a_list_ends_a_row() -> None:
    """A row repeats the end that it wrote."""
    columns = [[3, 4, 1], [0, 5, 1], [6, 7, 2], [7, 7, 0], [8, 8, 8]]
    for ends in [0, 7], (7, 0), torch.tensor([0, 7]):
        model = Script(columns)
        out = generate(model, [[1]] * 3, 5, GREEDY, eos_id=ends)  # type: ignore[arg-type]
        assert out.tolist() == [[3, 0, 0, 0], [4, 5, 7, 7], [1, 1, 2, 0]]
        assert model.calls == 4
    assert generate(Script(columns), [[1]] * 3, 5, GREEDY, eos_id=[]).size(1) == 5
    assert generate(Script(columns), [[1]] * 3, 5, GREEDY, eos_id=[9]).size(1) == 5


def test_stream_gives_the_columns_and_leaves_modes_as_they_were() -> None:
    model = small().train()
    wanted = generate(model, PROMPTS, 6, GREEDY)
    assert model.training
    columns = []
    for column in generate_stream(model, PROMPTS, 6, GREEDY):
        assert not torch.is_inference_mode_enabled()  # the caller's code may train
        assert not column.is_inference()
        columns.append(column)
    assert torch.equal(torch.stack(columns, 1), wanted)
    assert model.training
    stream = generate_stream(model, PROMPTS, 6, GREEDY)
    next(stream)
    stream.close()
    assert model.training
    model.eval()
    generate(model, PROMPTS, 2)
    assert not model.training


def test_F160_a_module_in_eval_mode_of_a_model_in_training_stays_there() -> None:
    model = small().train()
    next(model.layers.children()).eval()
    before = [module.training for module in model.modules()]
    generate(model, PROMPTS, 2, GREEDY)
    assert [module.training for module in model.modules()] == before


def test_one_prefill_then_single_tokens() -> None:
    model, sizes = small(), []
    model.embedding.register_forward_pre_hook(lambda _, args: sizes.append(tuple(args[0].shape)))
    generate(model, PROMPTS, 4)
    assert sizes == [(3, 7), (3, 1), (3, 1), (3, 1)]


class _HostReads(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("eos_id", "reads"), [(None, 0), (39, 1)])
def test_F122_a_token_costs_one_read_at_most(eos_id: int | None, reads: int) -> None:
    model, counts = small(), []
    for tokens in (5, 9):
        with _HostReads() as found:
            assert generate(model, [[1, 2]], tokens, GREEDY, eos_id=eos_id).shape == (1, tokens)
        counts.append(found.count)
    assert counts[1] - counts[0] == 4 * reads


def test_F116_rowwise_float8_generates() -> None:
    """In inference mode `reshape` reaches torchao's tensors whole, which it refuses by rows."""
    float8 = pytest.importorskip("torchao.float8")
    config = replace(float8.Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    model = small()
    float8.convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: name != "lm_head"
    )
    with torch.no_grad():
        wanted = int(model(torch.tensor([[5, 1, 7]]))[0, -1].argmax())
    assert generate(model, [[5, 1, 7]], 4, GREEDY)[0, 0] == wanted


def draw(logits: Tensor, count: int, **options: object) -> Counter:
    sampling = SamplingConfig(**options)
    draws = _Draws(0, 1, torch.device("cpu"))
    return Counter(int(sample(logits[None], sampling, draws)) for _ in range(count))


def test_F197_random_numbers_of_a_sample_are_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def numbers() -> list[Tensor]:
        draws = _Draws(5, 2, torch.device("cpu"))
        return [draws.next() for _ in range(12)]

    one_chunk = numbers()
    monkeypatch.setattr(_Draws, "_CHUNK", 5)
    assert torch.equal(torch.cat(numbers()), torch.cat(one_chunk))
    assert torch.cat(one_chunk).unique().numel() == 24


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_samples_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.2, 0.3])
    counts = draw(probabilities.log(), 4000)
    assert counts[1] == 0
    for token in (0, 2, 3):  # 4 standard deviations of a binomial count: 0.032 at the most
        assert counts[token] / 4000 == pytest.approx(probabilities[token].item(), abs=0.032)
    squared = probabilities**2 / (probabilities**2).sum()
    counts = draw(probabilities.log(), 4000, temperature=0.5)
    assert counts[0] / 4000 == pytest.approx(squared[0].item(), abs=0.032)


@pytest.mark.lane("quick")
def test_top_k_and_top_p_keep_k_tokens_and_p_probability() -> None:
    logits = torch.tensor([0.1, 0.4, 0.15, 0.35]).log()
    assert set(draw(logits, 500, top_k=2)) == {1, 3}
    assert set(draw(logits, 500, top_k=99)) == {0, 1, 2, 3}
    assert set(draw(logits, 500, top_p=0.7)) == {1, 3}
    assert set(draw(logits, 500, top_p=0.8)) == {1, 2, 3}
    assert set(draw(logits, 100, top_p=1e-9)) == {1}
    assert set(draw(logits, 500, top_k=3, top_p=0.99)) == {1, 2, 3}


def test_weights_of_tokens_are_those_of_transformers() -> None:
    """In the order in which its `generate` applies them."""
    process = pytest.importorskip("transformers.generation.logits_process")
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(31, (4, 6), generator=generator)
    for temperature, top_k, top_p, min_p, penalty in (
        (0.7, None, None, 0.2, 1.0),
        (1.3, 9, None, 0.1, 1.4),
        (1.0, 20, 0.8, 0.05, 0.6),
        (0.9, None, 0.5, None, 2.0),
        (1.0, None, None, 1.0, 1.0),
    ):
        logits = torch.randn(4, 31, generator=generator) * 2
        steps = [process.RepetitionPenaltyLogitsProcessor(penalty)]
        steps += [process.TemperatureLogitsWarper(temperature)]
        steps += [process.TopKLogitsWarper(top_k)] if top_k else []
        steps += [process.TopPLogitsWarper(top_p)] if top_p else []
        steps += [process.MinPLogitsWarper(min_p)] if min_p else []
        scores = logits
        for step in steps:
            scores = step(prompt, scores)
        sampling = SamplingConfig(temperature, top_k, top_p, min_p, penalty)
        penalized = _penalize(logits, _ids_in(prompt, None, logits), penalty)
        weights, ids = candidates(penalized, sampling)
        each = weights.diff(dim=-1, prepend=torch.zeros(4, 1)) / weights[:, -1:]
        found = torch.zeros(4, 31).scatter(1, ids, each)
        assert (found - scores.softmax(-1)).abs().max() < 1e-6


@pytest.mark.lane("quick")
@pytest.mark.parametrize("chunk", [1, 3, 5, 99])
@pytest.mark.parametrize("options", [{}, {"attention": AttentionSpec(window=3)}])
def test_a_prompt_in_chunks_gives_the_same_tokens(chunk: int, options: dict) -> None:
    model, sampling = small(**options), SamplingConfig(repetition_penalty=1.3, min_p=0.02)
    wanted = generate(model, PROMPTS, 12, sampling)
    forwards: list[int] = []
    hook = model.register_forward_pre_hook(lambda _, args: forwards.append(args[0].size(1)))
    assert torch.equal(generate(model, PROMPTS, 12, sampling, prefill_chunk=chunk), wanted)
    hook.remove()
    assert max(forwards) == min(chunk, 7)


def test_a_penalty_counts_what_a_row_holds_and_not_its_padding() -> None:
    model = small()
    sampling = SamplingConfig(temperature=0.0, repetition_penalty=1e6)
    rows = generate(model, PROMPTS, 20, sampling)
    assert torch.equal(generate(model, PROMPTS[1:2], 20, sampling)[0], rows[1])
    for prompt, row in zip(PROMPTS, rows.tolist(), strict=True):
        assert len({*prompt, *row}) == len({*prompt}) + 20


def test_wrong_arguments_raise_before_anything_runs() -> None:
    model = small().train()
    with rejects("max_new_tokens", 0, "range"):
        generate_stream(model, PROMPTS, 0)
    with rejects("max_new_tokens", 58, "length", where="max_seq_len 64"):
        generate_stream(model, PROMPTS, 58)
    with rejects("tokens", (1, 64), "length", where="max_seq_len 64"):
        generate_stream(model, [[1] * 64], 1)
    with rejects("prefill_chunk", 0, "range"):
        generate_stream(model, PROMPTS, 5, prefill_chunk=0)
    with rejects("prefill_chunk", 2, "excludes", where="images"):
        generate_stream(model, PROMPTS, 5, prefill_chunk=2, extras={"images": None})
    with rejects("min_p", 0, "range") as error:
        SamplingConfig(min_p=0, repetition_penalty=0.0)
    assert_problem(error.value, "repetition_penalty", 0.0, "range")
    with rejects("tokens", ..., "empty"):
        generate_stream(model, [[1], []], 4)
    with rejects("tokens", (3,), "shape"):
        generate_stream(model, torch.tensor([1, 2, 3]), 4)
    assert model.training


class _Waits(TorchFunctionMode):
    """Counts what makes the host wait for an accelerator: numbers and lists of indices that become its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func in (torch.tensor, torch.as_tensor) and (kwargs or {}).get("device") is not None
        indexed = func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
        parts = args[1] if indexed and isinstance(args[1], tuple) else args[1:2] if indexed else ()
        # [0, -1] is of document ids, which are read on the host
        if made or any(isinstance(part, list) and part != [0, -1] for part in parts):
            self.found.append(f"{func.__name__}{args} {kwargs}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("chunk", [None, 2])
def test_F182_no_numbers_go_to_a_device_with_a_wait(window: int | None, chunk: int | None) -> None:
    model = small(**({} if window is None else {"attention": AttentionSpec(window=window)}))
    ids = torch.tensor([[0, 0, 0, 0], [-1, -1, 0, 0], [0, 0, 1, 1]])
    waits = _Waits()
    with waits:
        default_positions(4, None, torch.device("cpu"), 3, [1, 2])
        default_positions(4, ids, torch.device("cpu"), 3)
        generate(model, PROMPTS, 3, GREEDY, prefill_chunk=chunk, eos_id=[5, 6])
        cache = KVCache(16)
        for begin in (0, 2):
            part = ids[:, begin : begin + 2]
            model(torch.ones_like(part), document_ids=part, cache=cache)
    assert waits.found == []


class Letters:
    end_ids, vocab_size = (0, 9), 2**20

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


class HostReads(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_F122_one_read_per_token_until_the_end_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def stream(*args: object, eos_id: object = None, **options: object) -> Iterator[Tensor]:
        assert eos_id is None  # generate_stream would read each token a second time for it
        return iter(torch.tensor([[104], [105], [0], [106]]))

    monkeypatch.setattr(sys.modules["forge_core.generate"], "generate_stream", stream)
    with HostReads() as found:
        assert list(generate_text(small(), Letters(), [97], 9)) == ["h", "i"]
    assert found.count == 3
