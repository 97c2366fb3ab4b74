"""The JSON schema of a configuration file, and the first lines, versions and changed keys that the command prints."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from forge_testing.jobs import write_job
from forge_train import cli
from forge_train.report.describe import key_rows
from forge_train.report.json_schema import json_schema

pytestmark = pytest.mark.lane("test")

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = sorted(ROOT.glob("apps/train/configs/*.toml")) + sorted(ROOT.glob("configs/**/*.toml"))
SCHEMA = json_schema()


@pytest.fixture(scope="module")
def validator() -> Any:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    return jsonschema.Draft202012Validator(SCHEMA)


@pytest.mark.parametrize("file", CONFIGS, ids=lambda f: f.name)
def test_jobs_of_the_repository_are_valid(file: Path, validator: Any) -> None:
    validator.validate(tomllib.loads(file.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "text",
    [
        "train.stpes = 3",
        "train.steps = 0",
        "train.steps = 'many'",
        "train.max_grad_norm = 0",
        "optimizer.betas = [0.9]",
        "lora.base_dtype = 'fp8'",
        "trian.steps = 3",
        "model.dmi = 3",
    ],
)
def test_mistakes_are_not_valid(text: str, validator: Any) -> None:
    assert list(validator.iter_errors(tomllib.loads(text)))


def test_every_key_is_in_it_with_its_text() -> None:
    for row in key_rows():
        names = row.key.split(".")
        found = [
            t
            for t in _tables(SCHEMA["properties"], names)
            if t.get("description", "") == row.meaning
        ]
        assert found, row.key


def _tables(properties: Any, names: list[str]) -> list[dict[str, Any]]:
    """The schemas of a dotted key, one for each model that has it."""
    schemas = [properties[names[0]]]
    for name in names[1:]:
        branches = [b for s in schemas for b in s.get("anyOf", [s])]
        if name == "<name>":
            schemas = [b["additionalProperties"] for b in branches if "additionalProperties" in b]
        else:
            schemas = [b["properties"][name] for b in branches if name in b.get("properties", {})]
    return schemas


def test_the_bare_command_prints_twelve_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_verb([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 12
    named = {line.split()[1] for line in lines if line.startswith("  forge-train")}
    assert named <= {*cli.VERBS, *cli.OF_LAB}


def test_version_names_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_verb(["--version"]) == 0
    shown = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert {"Python", "forge-train", "forge-train-core", "torch"} <= shown.keys()


def test_explain_changed_lists_what_is_no_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = str(write_job(tmp_path))
    assert cli.run_verb(["explain", job, "--changed", "--model.dim", "32", "--run.seed", "0"]) == 0
    keys = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    given = tomllib.loads(Path(job).read_text(encoding="utf-8"))
    assert "model.dim" in keys
    assert not {"train.loss", "run.seed"} & {*keys}
    assert "loss" not in given["train"]


def test_schema_is_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_verb(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(SCHEMA))
