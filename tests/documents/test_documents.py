"""What the documents say is what the code does."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from scripts import write_configuration_page, write_metrics_page
from scripts.write_command_line_page import commands_as_markdown
from scripts.write_models_page import models_as_markdown
from tests.documents.blocks import blocks_of
from tests.documents.commands import commands_of, missing_names

from forge_train.cli import OF_LAB, VERBS
from forge_train.metrics.columns import COLUMNS
from forge_train.report.describe import key_rows

pytestmark = pytest.mark.lane("test")

ROOT = Path(__file__).parents[2]
PAGES = [p for p in [*ROOT.glob("*.md"), *ROOT.glob("*/**/*.md")] if not {"runs", "dist", "node_modules"} & set(p.parts)
         and not any(part.startswith((".venv", ".hatch", ".ci")) for part in p.parts)]  # fmt: skip
#: What their pages name was so when they were written.
OF_THEIR_TIME = [p for p in PAGES if p.name in ("CHANGELOG.md", "log.md")]
#: Ends of names of files that look like keys, and a module.
FILES = (".jsonl", ".json", ".toml", ".txt", "resilience.health")


def relative(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_the_page_of_keys_is_the_one_the_code_generates() -> None:
    page = write_configuration_page.PAGE.read_text(encoding="utf-8")
    assert page == write_configuration_page.page(), (
        "run: hatch run python scripts/write_configuration_page.py"
    )


def test_the_page_of_columns_is_the_one_the_code_generates() -> None:
    page = write_metrics_page.PAGE.read_text(encoding="utf-8")
    assert page == write_metrics_page.page(), "run: hatch run python scripts/write_metrics_page.py"
    assert all(column.unit and column.range for column in COLUMNS)


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_the_page_of_commands_is_the_one_the_help_gives() -> None:
    """Run: hatch run dev:python scripts/write_command_line_page.py"""
    page = commands_as_markdown()
    assert page == (ROOT / "docs/command-line.md").read_text()
    titles = re.findall(r"^### forge-train (\w+)$", page, re.MULTILINE)
    assert titles == [verb for verb in (*VERBS, *OF_LAB) if verb != "study"]
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    doubled = re.compile(r"\(default: [^)]*\) \(default:|\|  \|$")
    assert [row for row in rows if doubled.search(row)] == []
    assert [row for row in rows if "--no_" in row and "(default: True)" not in row] == []


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_the_page_of_models_is_the_one_that_cells_and_families_give() -> None:
    """Run: hatch run dev:python scripts/write_models_page.py"""
    pytest.importorskip("transformers")
    assert models_as_markdown() == (ROOT / "docs/models.md").read_text()


def test_the_page_of_determinism_names_tests_that_exist() -> None:
    page = ROOT / "docs/determinism.md"
    named = re.findall(r"\[(test_\w+)\]\(([^)]+)\)", page.read_text())
    assert len(named) > 20
    lost = [n for n, file in named if f"def {n}(" not in (page.parent / file).read_text()]
    assert lost == []


def test_the_page_of_installation_lists_all_extras() -> None:
    rows = re.findall(r"^\| `((?:packages|apps)/[\w-]+)` \| (.*) \|$", (ROOT / "docs/install.md").read_text(), re.MULTILINE)  # fmt: skip
    listed = {folder: set(re.findall(r"`(\w+)`", extras)) for folder, extras in rows}
    projects = {
        str(file.parent.relative_to(ROOT)): tomllib.loads(file.read_text())["project"]
        for folder in ("packages", "apps")
        for file in ROOT.glob(f"{folder}/*/pyproject.toml")
    }
    extras = {name: set(of.get("optional-dependencies", ())) for name, of in projects.items()}
    assert listed == {name: found for name, found in extras.items() if found}


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


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    for target, _, anchor in (
        t.partition("#") for t in re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    ):
        if "://" not in target:
            file = (page.parent / target) if target else page
            assert file.exists(), target
            assert not anchor or file.suffix != ".md" or anchor in slugs(file), f"{target}#{anchor}"


def code_of(page: Path) -> list[str]:
    """The shell code of a page: blocks and spans."""
    spans = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    shell = [b.code for b in blocks_of(str(page)) if b.language in ("bash", "console")]
    return [*shell, *re.findall(r"`([^`\n]+)`", spans)]


@pytest.mark.lane("quick")
@pytest.mark.parametrize("page", [p for p in PAGES if p not in OF_THEIR_TIME and p.name != "bad-input.md"], ids=relative)  # fmt: skip
def test_commands_and_keys_of_a_page_exist(page: Path) -> None:
    for code in code_of(page):
        for words in commands_of(code):
            assert missing_names(words) == [], words

    text = page.read_text()
    keys = {row.key for row in key_rows()}
    flags = set(re.findall(r"--([a-z]+\.[a-z0-9_.]+[a-z0-9])", text)) - {"section.key"}
    # options of a part are keys of its own
    assert {re.sub(r"\.options\..+", ".options", named(flag)) for flag in flags} <= keys

    tables = {".".join(key.split(".")[:n]) for key in keys for n in (1, 2, 3, 4)}
    sections = {key.split(".")[0] for key in keys}
    spans = set(re.findall(r"`\[?([a-z]+(?:\.[a-z_0-9]+)+)\]?(?: = [^`]*)?`", text))
    spans = {key for key in spans if not key.endswith(FILES)}
    assert {named(key) for key in spans if key.split(".")[0] in sections} <= keys | tables


@pytest.mark.parametrize(
    "command",
    ["forge-train runn job.toml", "forge-train export RUN OUT --dtyp bf16", "srun -K python -m forge_parallel.prov m:Model",
     "torchrun --nproc-per-node 2 -m forge_train eval RUN --nothing", "cd x && forge-data prepare FILE --worker 2 # text",
     "FORGE_SITE=a python scripts/nothing.py", "hatch test tests/nothing", "hatch run nothing", "hatch run fuzz --nothing",
     "hatch run null-gpu sizes --unheard", "$ forge-ckpt cat STORE \\\n  --nothing"],
)  # fmt: skip
@pytest.mark.lane("quick")
def test_a_name_that_does_not_exist_is_found(command: str) -> None:
    (words,) = commands_of(command)
    assert len(missing_names(words)) == 1


def named(key: str) -> str:
    """A key with `<name>` for a name that the user chose."""
    tables = {row.key.partition(".<name>")[0] for row in key_rows() if "<name>" in row.key}
    return re.sub(rf"^({'|'.join(map(re.escape, tables))})\.\w+", r"\1.<name>", key)


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


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/index.md", "docs/install.md", "docs/first-ten-minutes.md", "docs/own-text.md", "docs/several-ranks.md", "docs/faq.md", "docs/slurm.md"])  # fmt: skip
def test_pages_for_newcomers_have_no_word_of_the_list_never(page: str) -> None:
    words = tomllib.loads((ROOT / "scripts/language.toml").read_text())["never"]
    patterns = [rf"(?<![A-Za-z])(?:{word.replace(' ', '[ _-]')})(?![A-Za-z])" for word in words]
    text = (ROOT / page).read_text()
    assert [pattern for pattern in patterns if re.search(pattern, text, re.IGNORECASE)] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100
