"""The example of the README runs, and the problems it quotes have their real keys and values."""

import re
from pathlib import Path

import pytest
from torch import arange, equal, long, zeros

import forge_core.optim
from forge_core import KVCache, Transformer, TransformerConfig, families, generate_stream
from forge_core._shared.problems import ProblemError, show
from forge_core.optim import OptimizerConfig, OptimizerGroupConfig

pytestmark = pytest.mark.lane("test")

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_first_line_explains_the_name() -> None:
    first = README.splitlines()[0]
    assert "`forge-train-core`" in first
    assert "PyPI belongs to somebody else" in first


@pytest.mark.slow  # CI runs it from the wheel, in scripts/smoke_wheels.py
def test_example_runs() -> None:
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert code is not None
    names: dict = {}
    exec(code.group(1), names)
    assert names["loss"].item() < 3.0  # from ln 256 = 5.5
    assert names["new"].shape == (1, 12)


@pytest.mark.slow  # CI runs it from the wheel, in scripts/smoke_wheels.py
def test_example_of_groups_runs() -> None:
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[1]
    names: dict = {**vars(forge_core.optim), "model": small(), "step": 1001}
    names["config"] = OptimizerConfig(groups={"tables": OptimizerGroupConfig(("embedding.*",))})
    exec(code, names)
    assert [g["lr"] for g in names["optimizer"].param_groups] == [5e-4, 5e-4, 0.0]
    assert names["model"].lm_head.weight.requires_grad


@pytest.mark.slow  # CI runs it from the wheel, in scripts/smoke_wheels.py
def test_examples_of_attention_and_activations_run() -> None:
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    seen, kept, changed = code[code.index(next(c for c in code if "interp" in c)) :][:3]
    names: dict = {"model": small(), "tokens": arange(10).view(2, 5) % 8}
    exec(seen, names)
    assert names["last"].shape == (2, 2, 5)
    exec(kept, names)
    assert names["alike"] > 0.5
    exec(changed, names)
    assert equal(names["patched"], names["model"](names["tokens"])), (
        "layers after 0 equal the clean run"
    )


def small() -> Transformer:
    return Transformer(TransformerConfig(8, dim=8, num_layers=2, num_heads=2, max_seq_len=64))


def overfill() -> None:
    cache, model = KVCache(4), small()
    model(zeros(1, 3, dtype=long), cache=cache)
    model(zeros(1, 2, dtype=long), cache=cache)


HF = {
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 8,
}


@pytest.mark.parametrize(
    "act",
    [
        lambda: TransformerConfig(8, dim=100, num_heads=3),
        lambda: TransformerConfig(8, num_heads=4, num_kv_heads=3),
        overfill,
        lambda: generate_stream(small(), [[1] * 7], 58),
        lambda: families.QWEN2_MOE.config_from_hf({**HF, "use_sliding_window": True}),
    ],
)
def test_quoted_refusals(act) -> None:
    with pytest.raises(ProblemError) as caught:
        act()
    (problem,), where = caught.value.problems, caught.value.where
    start = f"{where}: " if where else ""
    assert f"`{start}{problem.key} {show(problem.value)} " in README
