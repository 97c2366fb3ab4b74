"""What a refusal does not cost, and what a person who is refused is shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge_testing import write_job
from forge_testing.warm import WarmProcess
from forge_train import Callback, Trainer, load_job

CONFIG = 78

#: Runs one command line and tells what it imported.
IMPORTED = """
import json, sys
from forge_train.cli import main
try:
    main(sys.argv[1:])
finally:
    print(json.dumps([n for n in sys.modules if "._" not in n]))
"""
#: Seconds of import each, and of no use to somebody who mistyped a key.
HEAVY = {"transformers", "tokenizers", "torchao", "safetensors", "tensorboard", "triton", "sympy", "torch.distributed.tensor",
         "torch._inductor", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint",
         "forge_train.loop.trainer", "forge_train.plan"}  # fmt: skip


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmProcess]:
    """A process that has imported all that a run needs."""
    process = WarmProcess("forge_train.cli", "forge_train.loop.trainer")
    yield process
    process.close()


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize(
    ("text", "flag", "more"),
    [
        ("[train\n", "", {"torch", "numpy"}),
        ("[train]\nstepz = 3\n[model]\ndim = 0", "", set()),
        ("", "--help", set()),
    ],
    ids=["not TOML", "a mistake in a table", "help"],  # prose: the name of a case
)
def test_errors_and_help_import_nothing_heavy(
    tmp_path: Path, text: str, flag: str, more: set[str]
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(text)
    command = [sys.executable, "-c", IMPORTED, "run", flag or str(job)]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert refused.returncode == (0 if flag else CONFIG), refused.stderr
    assert not (HEAVY | more) & set(json.loads(refused.stdout.splitlines()[-1]))


@pytest.mark.slow
def test_a_run_directory_in_use_is_rejected_and_the_first_run_goes_on(
    tmp_path: Path, warm: WarmProcess
) -> None:
    job = write_job(tmp_path)
    told = []

    class Second(Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            if trainer.progress.step == 1:
                told.append(warm.call("forge_train.cli:main", ["run", str(job)], folder=tmp_path))

    first = Trainer(load_job(job, {"metrics.console": "off"}), [Second()])
    assert first.fit().exit_code == 0
    (second,) = told
    assert second.code == CONFIG, second.err
    assert "in use" in second.err
    assert str(os.getpid()) in second.err


@pytest.mark.slow
def test_all_problems_come_in_one_message(tmp_path: Path, warm: WarmProcess) -> None:
    (tmp_path / "bad.toml").write_text(
        '[run]\nseed = "x"\n[model]\ndim = 30\nnum_heads = 4\n[data.sources.a]\nname = "builtin"\n'
        "[train]\nsteps = 0\nglobal_bach = 4\n[eval]\nevery_steps = true\n"
    )
    refused = warm.call("forge_train.cli:main", ["run", "bad.toml"], folder=tmp_path)
    for part in (
        "run.seed 'x'",
        "model.dim 30",
        "train.steps 0",
        "train.global_bach",
        "eval.every_steps True",
    ):
        assert part in refused.err, refused.err


@pytest.mark.slow
def test_help_lists_every_key(tmp_path: Path, warm: WarmProcess) -> None:
    from forge_train.report.describe import key_rows

    def shown(*args: str) -> str:
        said = warm.call("forge_train.cli:main", list(args), folder=tmp_path)
        assert said.code == 0, said.err
        return said.out

    (tmp_path / "vlm.toml").write_text('[model]\nname = "vlm"\n')
    rows = [row for row in key_rows() if row.type != "table" and "model.args" not in row.key]
    keys = [row.key for row in rows]
    said = shown("keys")
    assert [key for key in keys if key not in said] == []
    assert shown("keys", "model.moe.top_").splitlines()[0].split()[0] == "model.moe.top_k"
    assert "model.moe.top_k" not in shown("--help") + shown("keys", "data.")
    said = shown("run", "vlm.toml", "--help")
    assert [key for key in keys if key not in said] == []
    assert "model.name  (str; default 'vlm')" in said
