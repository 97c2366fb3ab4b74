"""Names, scripts and notebooks of the other project stand on its page once, and lead to what is there."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from pydoc import ErrorDuringImport, locate

import pytest

import forge_ckpt.cli
import forge_data.cli
import forge_vlm.data.command
from forge_train import cli
from forge_train.metrics.columns import column_of
from forge_train.report.describe import key_rows

pytestmark = pytest.mark.lane("test")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/from-kempnerforge.md").read_text().partition("\n## Functions, ")[2]
# What there was in June 2026 (hooks of the loop: July), by section of the page.
THERE = {
    "Hooks and evaluation": "TrainingHook, HookRunner, StepContext, run_training, step_fn, run_eval",
    "Activations": "ActivationStore, extract_representations, save_activations",
    "Metrics and profiling in code": "MetricsTracker, compute_mfu, peak table, memory monitor, wandb and TensorBoard,"
    " CUDATimer, profiler builder",
    "Scripts": "train, generate, eval, eval harness, prepare data, prepare VLM, convert checkpoint, check environment,"
    " check_env --init, SLURM single-node, SLURM multi-node, SLURM requeue, SLURM interactive, DCGM monitor,"
    " distributed tests",
    "Examples and notebooks": "custom hook, model inspection, attention visualisation, activation extraction,"
    " checkpoint analysis, optimizer comparison, MoE routing",
}
COMMANDS: dict[str, Callable[[list[str]], object]] = {
    "forge-train": cli._dispatch,
    "forge-data": forge_data.cli.main,
    "forge-ckpt": forge_ckpt.cli.main,
    "forge-vlm": forge_vlm.data.command.main,
}
SUFFIXES = (".py", ".toml", ".ipynb", ".md")


def rows() -> dict[str, list[tuple[str, str, str]]]:
    """{section: (what there is there, here or "gone", remark)}."""
    found = {}
    for part in PAGE.split("\n### ")[1:]:
        title, _, body = part.partition("\n")
        cells = re.findall(r"^\| `([^`]+)` \| (`.+?`|gone) \| ?(.*?) ?\|$", body, re.MULTILINE)
        assert len(cells) == body.count("\n| ") - 1, f"{title}: a row differs in form"
        found[title] = cells
    return found


def spans() -> list[str]:
    """All code on the right."""
    found: dict[str, None] = {}
    for part in rows().values():
        for _, here, remark in part:
            found |= dict.fromkeys(re.findall(r"`([^`]+)`", f"{here} {remark}"))
    return list(found)


@cache
def key_names() -> set[str]:
    return {row.key for row in key_rows()}


def is_name(dotted: str) -> bool:
    """Whether a module, or a name in one, is there; where an extra is missing, by the module's source."""
    try:
        return locate(dotted) is not None
    except ErrorDuringImport:
        module, _, name = dotted.rpartition(".")
        spec = find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        return bool(
            re.search(rf"^(class|def) {name}\b", Path(spec.origin).read_text(), re.MULTILINE)
        )


def problem_of(span: str, help_of: Callable[[str, tuple[str, ...]], str]) -> str | None:
    """Why the code of a span leads nowhere; None if it is a command, a file, a name, a key or a column that is there."""
    command, *words = span.split(" ")
    if command in COMMANDS:
        verbs = tuple(word for word in words if not word.startswith("--"))
        shown = help_of(command, verbs)
        flags = [word for word in words if word.startswith("--")]
        lost = [flag for flag in flags if not re.search(rf"{flag}\b", shown)]
        return f"{command} {' '.join(verbs)} has no {lost[0]}" if lost else None
    if span.endswith(SUFFIXES):
        return None if (ROOT / span).is_file() else f"{span} is no file"
    if span.startswith("forge_"):
        return None if is_name(span) else f"{span} is no name to import"
    if column_of(span) is not None:
        return None
    return None if span in key_names() else f"{span} is no key, and nothing else either"


def test_everything_there_is_mapped_once_and_what_is_gone_has_a_reason() -> None:
    found = rows()
    assert {title: [row[0] for row in part] for title, part in found.items()} == {
        title: names.split(", ") for title, names in THERE.items()
    }
    for part in found.values():
        assert all(remark for _, here, remark in part if here == "gone")


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_what_is_here_exists(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")

    @cache
    def help_of(command: str, verbs: tuple[str, ...]) -> str:
        capsys.readouterr()
        code: object = None
        try:
            code = COMMANDS[command]([*verbs, "--help"])
        except SystemExit as stop:
            code = stop.code
        shown, errors = capsys.readouterr()
        assert not code, f"{command} {verbs}: {errors}"
        return shown

    assert [problem for span in spans() if (problem := problem_of(span, help_of))] == []
    # and the looking up sees what is not there
    for wrong in (
        "forge-train eval --confg", "examples/weight_norm.py", "forge_core.interp.ActivationStor", "eval.every_step",
        "forge_lab.lm_harness.Forg",
    ):  # fmt: skip
        assert problem_of(wrong, help_of), wrong
    with pytest.raises(AssertionError, match=r"forge-train .*evaluate"):
        help_of("forge-train", ("evaluate",))
