"""What the documents say is what the code does."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from scripts import write_configuration_page, write_metrics_page

from forge_train.cli import OF_LAB, VERBS
from forge_train.metrics.columns import COLUMNS
from forge_train.report.describe import key_rows

pytestmark = pytest.mark.lane("test")

ROOT = Path(__file__).parents[2]
PAGES = [p for p in [*ROOT.glob("*.md"), *ROOT.glob("*/**/*.md")] if not {"runs", "dist", "node_modules"} & set(p.parts)
         and not any(part.startswith((".venv", ".hatch", ".ci")) for part in p.parts)]  # fmt: skip


def test_the_page_of_keys_is_the_one_the_code_generates() -> None:
    page = write_configuration_page.PAGE.read_text(encoding="utf-8")
    assert page == write_configuration_page.page(), (
        "run: hatch run python scripts/write_configuration_page.py"
    )


def test_the_page_of_columns_is_the_one_the_code_generates() -> None:
    page = write_metrics_page.PAGE.read_text(encoding="utf-8")
    assert page == write_metrics_page.page(), "run: hatch run python scripts/write_metrics_page.py"
    assert all(column.unit and column.range for column in COLUMNS)


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


def slugs(page: Path) -> set[str]:
    """Anchors of the headings of a page: small letters, no punctuation, blanks as `-`; of equal ones, the first."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles]
    return {re.sub(r"[^\w\- ]", "", title).strip().replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    for target, _, anchor in (
        t.partition("#") for t in re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    ):
        if "://" not in target:
            file = (page.parent / target) if target else page
            assert file.exists(), target
            assert not anchor or file.suffix != ".md" or anchor in slugs(file), f"{target}#{anchor}"


def code_of(text: str) -> str:
    """The blocks and the spans of code of a page."""
    blocks = re.findall(r"^```.*?^```", text, re.DOTALL | re.MULTILINE)
    return "\n".join([*blocks, *re.findall(r"`([^`\n]+)`", text)])


@pytest.mark.lane("quick")
@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.name != "bad-input.md"], ids=lambda p: str(p.relative_to(ROOT))
)
def test_verbs_and_flags_exist(page: Path) -> None:
    flags = {f"--{row.key}" for row in key_rows()}
    text = page.read_text()
    verbs = set(re.findall(r"\bforge-train ([a-z]+)\b", code_of(text)))
    example = tomllib.loads((ROOT / "examples/example_lab/pyproject.toml").read_text())["project"]
    assert verbs <= {*VERBS, *OF_LAB, "ckpt", "data", *example["entry-points"]["forge.commands"]}
    for flag in set(re.findall(r"--[a-z]+\.[a-z_.]+[a-z]", text)) - {"--section.key"}:
        pattern = re.sub(r"^--data\.sources\.\w+\.", "--data.sources.<name>.", flag)
        assert pattern in flags, flag


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/faq.md", "docs/exit-codes.md", "docs/first-ten-minutes.md", "docs/glossary.md"])  # fmt: skip
def test_keys_that_pages_for_newcomers_name_exist(page: str) -> None:
    keys = {row.key for row in key_rows()}
    sections = {key.split(".")[0] for key in keys} - {"data", "run", "metrics"}
    tables = {".".join(key.split(".")[:n]) for key in keys for n in (1, 2, 3)}
    named = set(
        re.findall(r"`\[?([a-z]+(?:\.[a-z_]+)+)\]?(?: = [^`]*)?`", (ROOT / page).read_text())
    )
    assert {name for name in named if name.split(".")[0] in sections} - {
        "sample.txt"
    } <= keys | tables


def test_the_page_of_variables_has_all_of_ours() -> None:
    page = (ROOT / "docs/environment-variables.md").read_text()
    sources = [
        p
        for folder in ("packages", "apps")
        for kind in ("py", "sh")
        for p in (ROOT / folder).glob(f"*/src/**/*.{kind}")
    ]
    named = {name for p in sources for name in re.findall(r"\bFORGE_[A-Z_]*[A-Z]\b", p.read_text())}
    assert set(re.findall(r"`(FORGE_[A-Z_]+)`", page)) == named


def test_the_readme_lists_every_package() -> None:
    readme = (ROOT / "README.md").read_text()
    for folder in ROOT.glob("packages/*"):
        assert f"(packages/{folder.name})" in readme


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/index.md", "docs/first-ten-minutes.md", "docs/faq.md", "docs/slurm.md"])  # fmt: skip
def test_pages_for_newcomers_have_no_word_of_the_list_never(page: str) -> None:
    words = tomllib.loads((ROOT / "scripts/language.toml").read_text())["never"]
    patterns = [rf"(?<![A-Za-z])(?:{word.replace(' ', '[ _-]')})(?![A-Za-z])" for word in words]
    text = (ROOT / page).read_text()
    assert [pattern for pattern in patterns if re.search(pattern, text, re.IGNORECASE)] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100
