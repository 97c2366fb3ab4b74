"""Parts by name: what a model is built of, and what is refused before anything is called."""

import importlib.metadata
import sys
import types

import pytest
import torch
from torch import nn

from forge_core import (
    Attention,
    OptimizerConfig,
    RopeScaling,
    ScheduleConfig,
    Transformer,
    TransformerConfig,
    build_optimizer,
    build_schedule,
    initialize,
)
from forge_core.model import Block, FeedForward, check_init_tables, check_parts
from forge_core.model.rope import inverse_frequencies
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

SHAPE = {"vocab_size": 16, "dim": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 16}


class Mixer(Attention):
    def __init__(self, config, layer, every: int, name: str = "x"):
        super().__init__(config)
        self.layer, self.every = layer, every


class Wide(FeedForward):
    def __init__(self, config, layer, times: int = 2):
        super().__init__(config.dim, times * config.dim)
        self.layer = layer


class Twice(Block):
    def __init__(self, config, mixer, feed_forward, *, gain: float = 2.0):
        super().__init__(config, mixer, feed_forward)
        self.gain = gain


def by(frequencies, scaling, share: float = 0.5):
    return frequencies * share


@pytest.fixture
def lab(monkeypatch):
    module = types.ModuleType("example_lab")
    for part in (Mixer, Wide, Twice, by):
        setattr(module, part.__name__, part)
    module.number = 3
    module.alone = lambda config: None
    monkeypatch.setitem(sys.modules, "example_lab", module)


def test_each_part_by_import_path_gets_its_options(lab) -> None:
    config = TransformerConfig(
        **SHAPE,
        mixer="example_lab:Mixer",
        mixer_options={"every": 3},
        norm="torch.nn:RMSNorm",
        norm_options={"elementwise_affine": True},
        feed_forward="example_lab:Wide",
        feed_forward_options={"times": 4},
        block="example_lab:Twice",
        block_options={"gain": 3.0},
        rope_scaling=RopeScaling(name="example_lab:by", options={"share": 0.25}),
    )
    model = Transformer(config)
    assert (
        [b.mixer.layer for b in model.blocks()]
        == [0, 1]
        == [b.feed_forward.layer for b in model.blocks()]
    )
    (block, _) = model.blocks()
    assert (type(block), block.gain, block.mixer.every) == (Twice, 3.0, 3)
    assert block.feed_forward.up_proj.out_features == 32
    assert {type(m) for m in (model.norm, block.mixer_norm)} == {nn.RMSNorm}
    plain = inverse_frequencies(4, 1e4, None)
    assert torch.equal(inverse_frequencies(4, 1e4, config.rope_scaling), plain * 0.25)
    assert model(torch.zeros(1, 3, dtype=torch.long)).shape == (1, 3, 16)


def test_an_argument_goes_before_the_name() -> None:
    config = TransformerConfig(**SHAPE, feed_forward="gelu")
    model = Transformer(config, feed_forward=lambda layer: Wide(config, layer))
    assert {type(b.feed_forward) for b in model.blocks()} == {Wide}


def test_linear_stretching_by_its_definition() -> None:
    plain = inverse_frequencies(8, 1e4, None)
    assert torch.equal(inverse_frequencies(8, 1e4, RopeScaling(4.0, name="linear")), plain / 4)


@pytest.mark.parametrize(
    ("options", "key", "value", "code"),
    [
        ({"mixer": "nowhere:Mixer"}, "model.mixer", "nowhere:Mixer", "import"),
        ({"mixer": "example_lab:Mixer"}, "model.mixer_options.every", ..., "missing"),
        (
            {"mixer": "example_lab:Mixer", "mixer_options": {"every": 1, "evry": 2}},
            *("model.mixer_options.evry", 2, "unknown_key"),
        ),
        (
            {"mixer": "example_lab:Mixer", "mixer_options": {"every": 1.5}},
            *("model.mixer_options.every", 1.5, "type"),
        ),
        (
            {"mixer": "example_lab:Mixer", "mixer_options": {"every": True}},
            *("model.mixer_options.every", True, "type"),
        ),
        (
            {"mixer": "example_lab:Mixer", "mixer_options": {"every": 1, "layer": 2}},
            *("model.mixer_options.layer", 2, "unknown_key"),
        ),
        ({"mixer": "example_lab:alone"}, "model.mixer", "example_lab:alone", "positional"),
        ({"block": "example_lab:number"}, "model.block", "example_lab:number", "type"),
        ({"norm_options": {"eps": 1e-6}}, "model.norm_options.eps", 1e-6, "built_in"),
        (
            {"rope_scaling": RopeScaling(name="example_lab:by", options={"shar": 1.0})},
            *("model.rope_scaling.options.shar", 1.0, "unknown_key"),
        ),
    ],
)
def test_options_that_a_part_does_not_take_are_rejected_without_a_call(
    lab, options: dict, key: str, value: object, code: str
) -> None:
    config = TransformerConfig(**SHAPE, **options)
    near = "'every'" if key.endswith("evry") else ""
    with rejects(key, value, code, where=near):
        check_parts(config)
    with rejects(key, value, code):
        Transformer(config)


def test_all_parts_in_one_message(lab) -> None:
    config = TransformerConfig(**SHAPE, mixer="a:b", block="c:d", norm="e:f", feed_forward="g:h")
    with rejects("model.mixer", "a:b", "import") as caught:
        check_parts(config)
    assert len(caught.value.problems) == 4


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("mixer", ("attention", "mla")),
        ("block", ("pre_norm", "post_norm", "sandwich")),
        ("norm", ("rms_norm", "layer_norm", "rms_norm_plus_one")),
    ],
)
def test_an_unknown_name_is_rejected_when_the_config_is_made(
    name: str, choices: tuple[str, ...]
) -> None:
    with rejects(name, "x", "unknown") as caught:
        TransformerConfig(16, **{name: "x"})
    assert all(repr(choice) in str(caught.value) for choice in choices)


def test_the_error_of_a_foreign_key_names_the_part_that_has_it(lab) -> None:
    with rejects("min_lr_ratio", 0.2, "foreign", where="'cosine'"):
        ScheduleConfig("constant", min_lr_ratio=0.2)
    for key in ("low_freq_factor", "high_freq_factor", "original_max_position"):
        with rejects(key, 2, "foreign", where="'llama3'"):
            RopeScaling(2.0, name="linear", **{key: 2})
    RopeScaling(2.0, name="example_lab:by", high_freq_factor=2.0)  # may read them


def test_options_of_schedules_and_optimizers(lab) -> None:
    lab = sys.modules["example_lab"]
    lab.flat = lambda config, total_steps, *, at: lambda step: at
    lab.sgd = lambda model, config, momentum=0.0: torch.optim.SGD(
        model.parameters(), config.lr, momentum
    )
    schedule = ScheduleConfig("example_lab:flat", options={"at": 0.5})
    assert build_schedule(schedule, 10)(1) == 0.5
    model = nn.Linear(2, 2)
    for name in ("torch.optim:SGD", "example_lab:sgd"):
        optimizer = build_optimizer(model, OptimizerConfig(name, options={"momentum": 0.5}))
        assert optimizer.param_groups[0]["momentum"] == 0.5
        with rejects("optimizer.options.moment", 1, "unknown_key", where="'momentum'"):
            build_optimizer(model, OptimizerConfig(name, options={"moment": 1}))
    with rejects("optimizer.options.lr", 1.0, "unknown_key"):
        build_optimizer(model, OptimizerConfig("torch.optim:SGD", options={"lr": 1.0}))
    with rejects("optimizer.options.amsgrad", True, "built_in"):
        build_optimizer(model, OptimizerConfig(options={"amsgrad": True}))
    with rejects("schedule.options.at", ..., "missing"):
        build_schedule(ScheduleConfig("example_lab:flat"), 10)


def test_an_installed_part_is_found_by_its_name(monkeypatch) -> None:
    point = types.SimpleNamespace(
        name="theirs", load=lambda: lambda config, layer: Attention(config)
    )
    found = lambda group: [point] if group == "forge.mixers" else []  # noqa: E731
    monkeypatch.setattr("forge_core.registry.entry_points", found)
    Transformer(TransformerConfig(**SHAPE, mixer="theirs"))
    with rejects("mixer", "their", "unknown"):
        TransformerConfig(**SHAPE, mixer="their")
    assert importlib.metadata.entry_points is not found


def test_what_cannot_begin_on_the_meta_device_is_named() -> None:
    class Lost(Attention):
        def __init__(self, config):
            super().__init__(config)
            self.register_buffer("decay", torch.ones(2))

    class Described(Lost):
        def init_table(self, std, residual_std):
            return {**super().init_table(std, residual_std), "decay": ("constant", 2.0)}

    config = TransformerConfig(**SHAPE)
    for kind in (Lost, Described):
        with torch.device("meta"):
            model = Transformer(config, mixer=lambda _: kind(config))  # noqa: B023
        if kind is Lost:
            with rejects("layers.0.mixer.decay", ..., "missing") as caught:
                check_init_tables(model)
            assert len(caught.value.problems) == 1  # one for all layers
    check_init_tables(model)
    initialize(model.to_empty(device="cpu"), 0)
    assert model.blocks()[1].mixer.decay.tolist() == [2.0, 2.0]


def test_configs_with_options_have_a_hash() -> None:
    one, two = (TransformerConfig(16, mixer="a:b", mixer_options={"x": n}) for n in (1, 2))
    assert hash(one) == hash(two)
    assert one != two
