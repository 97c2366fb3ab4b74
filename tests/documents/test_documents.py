"""What the documents say is what the code does."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from forge_train.cli import VERBS
from forge_train.config.describe import key_rows, keys_as_markdown
from forge_train.metrics.columns import columns_as_markdown

pytestmark = pytest.mark.lane("test")

ROOT = Path(__file__).parents[2]
PAGES = [p for p in [*ROOT.glob("*.md"), *ROOT.glob("*/**/*.md")] if not {"runs", "dist", "node_modules"} & set(p.parts)
         and not any(part.startswith((".venv", ".hatch")) for part in p.parts)]  # fmt: skip


def test_the_page_of_keys_is_the_one_the_code_generates() -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    assert keys_as_markdown() in page, "run: hatch run python scripts/write_configuration_page.py"


def test_the_page_of_columns_is_the_one_the_code_generates() -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    assert columns_as_markdown() in page, "run: hatch run python scripts/write_metrics_page.py"


def regression_tests() -> dict[str, set[str]]:
    """F number -> names of the tests that carry it."""
    found: dict[str, set[str]] = {}
    for folder in ("packages", "apps", "tests"):
        for file in (ROOT / folder).glob("**/test_*.py"):
            for name, number in re.findall(r"def (test_(F\d+)_\w+)", file.read_text()):
                found.setdefault(number, set()).add(name)
    return found


def test_every_catalogued_failure_has_a_test_and_the_other_way_round() -> None:
    page = (ROOT / "docs/known-failures.md").read_text()
    listed = set(re.findall(r"^\| (F\d+) ", page, re.MULTILINE))
    assert listed == regression_tests().keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.lane("quick")
@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.name != "bad-input.md"], ids=lambda p: str(p.relative_to(ROOT))
)
def test_commands_and_flags_exist(page: Path) -> None:
    flags = {f"--{row.key}" for row in key_rows()}
    text = page.read_text()
    for verb in re.findall(r"forge-train ([a-z]+)\b", text):
        assert verb in VERBS or verb not in ("train",), verb
    for flag in set(re.findall(r"--[a-z]+\.[a-z_.]+[a-z]", text)) - {"--section.key"}:
        pattern = re.sub(r"^--data\.sources\.\w+\.", "--data.sources.<name>.", flag)
        assert pattern in flags, flag


def test_scripts_that_the_readme_names_are_in_the_workspace() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["envs"]
    named = set(re.findall(r"^hatch run (\w+)$", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert {"train"} <= named
    assert named <= scripts["default"]["scripts"].keys()


def test_the_catalogue_of_the_house_lists_every_package() -> None:
    readme = (ROOT / "README.md").read_text()
    for folder in ROOT.glob("packages/*"):
        assert f"(packages/{folder.name})" in readme
