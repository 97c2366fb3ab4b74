"""Adapters against loops over windows, heads and latents, in float64."""

import math

import pytest
import torch

from forge_testing.problems import rejects
from forge_vlm import adapters
from forge_vlm.vision import Features

pytestmark = pytest.mark.lane("test")

ROWS, COLUMNS, WIDTH, DIM = 4, 6, 8, 12


def adapter_of(name, width=WIDTH, **options):
    torch.manual_seed(0)
    tables = {name: options.pop("table")} if "table" in options else {}
    adapter = adapters.build_adapter(adapters.AdapterConfig(name, **tables), width, DIM).double()
    for parameter in adapter.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.5)
    return adapter


def features(images=2):
    x = torch.randn(images, ROWS * COLUMNS, WIDTH, dtype=torch.float64, requires_grad=True)
    return x, Features(x, ROWS, COLUMNS)


def window(image, row, column, factor):
    """The tokens of one window, row by row."""
    rows = range(row * factor, (row + 1) * factor)
    columns = range(column * factor, (column + 1) * factor)
    return [image[r * COLUMNS + c] for r in rows for c in columns]


def attend(query, keys, values, heads):
    """One query over a list of keys, head by head."""
    size = len(query) // heads
    out = []
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        scores = [query[part] @ key[part] / math.sqrt(size) for key in keys]
        weights = torch.softmax(torch.stack(scores), 0)
        out.append(sum(w * value[part] for w, value in zip(weights, values)))
    return torch.cat(out)


def of_windows(x, factor, make):
    """make(tokens of a window) of all windows, row by row: (N, T / factor^2, D)."""
    return torch.stack(
        [
            torch.stack(
                [
                    make(window(image, row, column, factor))
                    for row in range(ROWS // factor)
                    for column in range(COLUMNS // factor)
                ]
            )
            for image in x
        ]
    )


def slow_attentional_pool(m, x):
    def pool(tokens):
        query = m.q_proj(sum(tokens) / len(tokens))
        keys, values = [m.k_proj(t) for t in tokens], [m.v_proj(t) for t in tokens]
        return m.o_proj(attend(query, keys, values, 4))

    return of_windows(x, 2, pool)


def slow_resampler(m, x):
    rows = []
    for image in x:
        latents = list(m.latents.weight)
        for layer in m.layers:
            own = [layer.latents_norm(z) for z in latents]
            asked = [layer.features_norm(m.proj(token)) for token in image] + own
            keys, values = [layer.k_proj(a) for a in asked], [layer.v_proj(a) for a in asked]
            seen = [attend(layer.q_proj(z), keys, values, 3) for z in own]
            latents = [z + layer.o_proj(s) for z, s in zip(latents, seen)]
            gelu = torch.nn.functional.gelu
            fed = [layer.down(gelu(layer.up(layer.feed_forward_norm(z)))) for z in latents]
            latents = [z + f for z, f in zip(latents, fed)]
        rows.append(torch.stack([m.norm(z) for z in latents]))
    return torch.stack(rows)


CASES = {
    "linear": ({}, lambda m, x: torch.nn.functional.linear(x, m.weight, m.bias)),
    "pixel_shuffle": (
        {"table": adapters.PixelShuffleConfig(bias=True)},
        lambda m, x: of_windows(x, 2, lambda tokens: m.proj(torch.cat(tokens))),
    ),
    "pixel_shuffle_mlp": (
        {},
        lambda m, x: of_windows(
            x,
            2,
            lambda tokens: m.linear_2(
                torch.nn.functional.gelu(m.linear_1(m.norm(torch.cat(tokens))))
            ),
        ),
    ),
    "average_pool": (
        {"table": adapters.AveragePoolConfig(factor=2)},
        lambda m, x: of_windows(x, 2, lambda tokens: m.proj(sum(tokens) / 4)),
    ),
    "attentional_pool": (
        {"table": adapters.AttentionalPoolConfig(num_heads=4)},
        slow_attentional_pool,
    ),
    "resampler": ({"table": adapters.ResamplerConfig(num_latents=5, num_heads=3)}, slow_resampler),
}


@pytest.mark.parametrize("name", list(CASES))
def test_values_and_gradients_are_those_of_loops(name):
    options, slow = CASES[name]
    adapter, (x, given) = adapter_of(name, **options), features()
    found, wanted = adapter(given), slow(adapter, x)
    assert found.shape == (2, adapter.tokens(ROWS, COLUMNS), DIM)
    torch.testing.assert_close(found, wanted)
    weights = torch.randn(found.shape, dtype=torch.float64)
    inputs = (x, *adapter.parameters())
    for ours, theirs in zip(
        torch.autograd.grad((found * weights).sum(), inputs),
        torch.autograd.grad((wanted * weights).sum(), inputs),
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
        assert (
            float(theirs.abs().max()) > 0 or name == "attentional_pool"
        )  # the keys' bias has none


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (adapters.AdapterConfig("linear"), 24),
        (adapters.AdapterConfig("mlp"), 24),
        (adapters.AdapterConfig("pixel_shuffle"), 6),
        (adapters.AdapterConfig("pixel_shuffle_mlp"), 6),
        (
            adapters.AdapterConfig(
                "average_pool", average_pool=adapters.AveragePoolConfig(factor=1)
            ),
            24,
        ),
        (adapters.AdapterConfig("attentional_pool"), 6),
        (adapters.AdapterConfig("resampler", resampler=adapters.ResamplerConfig(num_heads=4)), 64),
    ],
)
def test_each_reports_how_many_tokens_it_makes(config, count):
    adapter = adapters.build_adapter(config, WIDTH, DIM)
    out = adapter(Features(torch.randn(1, ROWS * COLUMNS, WIDTH), ROWS, COLUMNS))
    assert out.shape == (1, adapter.tokens(ROWS, COLUMNS), DIM) == (1, count, DIM)


def test_the_encoder_may_have_the_width_of_the_stream():
    adapter = adapters.build_adapter(adapters.AdapterConfig("none"), DIM, DIM)
    x = torch.randn(1, 6, DIM)
    assert adapter(Features(x)) is x
    assert adapter.tokens(2, 3) == 6


@pytest.mark.parametrize(
    "name", ["pixel_shuffle", "pixel_shuffle_mlp", "average_pool", "attentional_pool"]
)
def test_windows_that_do_not_fit_are_rejected(name):
    adapter = adapters.build_adapter(adapters.AdapterConfig(name), WIDTH, DIM)
    for rows, columns in ((3, 4), (0, 0)):
        with rejects(f"adapter.{name}.factor", 2):
            adapter(Features(torch.randn(1, 12, WIDTH), rows, columns))


@pytest.mark.parametrize(
    ("make", "key", "value", "code"),
    [
        (lambda: adapters.AdapterConfig("mpl"), "name", "mpl", "unknown"),
        (
            lambda: adapters.AdapterConfig(
                "mlp", resampler=adapters.ResamplerConfig(num_latents=8)
            ),
            *("resampler.num_latents", 8, "foreign"),
        ),
        (lambda: adapters.AdapterConfig("mlp", options={"a": 1}), "options", ..., "foreign"),
        (lambda: adapters.ResamplerConfig(num_latents=0), "num_latents", 0, "size"),
        (lambda: adapters.MLPConfig(hidden_dim=0), "hidden_dim", 0, "size"),
        (lambda: adapters.AttentionalPoolConfig(factor=0), "factor", 0, "size"),
        (
            lambda: adapters.build_adapter(adapters.AdapterConfig("none"), WIDTH, DIM),
            *("adapter.name", "none", "width"),
        ),
        (
            lambda: adapters.build_adapter(adapters.AdapterConfig("resampler"), WIDTH, DIM),
            *("adapter.resampler.num_heads", 8, "divides"),
        ),
        (
            lambda: adapters.build_adapter(adapters.AdapterConfig("attentional_pool"), 12, DIM),
            *("adapter.attentional_pool.num_heads", 8, "divides"),
        ),
    ],
)
def test_impossible_arguments_are_rejected(make, key, value, code):
    with rejects(key, value, code):
        make()
