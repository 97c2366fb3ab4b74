"""The site of the documents builds without a warning, loads nothing from other hosts, and a mistake fails its build."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

pytest.importorskip("mkdocs", reason="dev group")
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort
from scripts.write_api_pages import PACKAGES, public_modules, public_names
from scripts.write_diagrams import DIAGRAMS

pytestmark = [pytest.mark.slow, pytest.mark.lane("ci")]

ROOT = Path(__file__).parents[2]
HOOKS = ROOT / "scripts/docs_hooks.py"
MOST_PAGES, MOST_LINES = 60, 250
SECTIONS = ["Start", "Guides", "Concepts", "Reference", "Evidence", "Migrate", "Contribute"]
#: Attributes that make a browser load something when a page is opened.
LOADING = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src",
           "video": "src", "audio": "src", "embed": "src", "object": "data", "use": "href"}  # fmt: skip


class Elements(HTMLParser):
    """What a page loads, the ids of its elements, and its style sheets and attributes."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loaded, self.ids, self.styles = list[str](), set[str](), list[str]()
        self._in_style = False
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.loaded += [found.get(LOADING.get(tag, "")) or "", *_images(found.get("srcset") or "")]
        self.ids.add(found.get("id") or "")
        self.styles.append(found.get("style") or "")
        self._in_style = tag == "style"

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.styles.append(data)


def _images(srcset: str) -> list[str]:
    return [part.split()[0] for part in srcset.split(",") if part.strip()]


def outside(urls: list[str]) -> list[str]:
    return [url for url in urls if re.match(r"\s*([a-z]+:)?//", url, re.IGNORECASE)]


def styles_outside(text: str) -> list[str]:
    """URLs of other hosts in url(...) and @import of a style sheet."""
    return outside(re.findall(r"(?:url\(|@import)\s*[\"']?([^\"')\s;]+)", text))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    pages, sheets = list(site.rglob("*.html")), list(site.rglob("*.css"))
    assert len(pages) > 40
    assert sheets
    for page in pages:
        found = Elements(page)
        assert outside(found.loaded) == [], page
        assert [url for text in found.styles for url in styles_outside(text)] == [], page
    for sheet in sheets:
        assert styles_outside(sheet.read_text(encoding="utf-8")) == [], sheet
    assert not [f for f in pages + sheets if "fonts.googleapis" in f.read_text(encoding="utf-8")]


def test_a_foreign_host_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        '<link rel="preconnect" href="https://a"><script src="//b/c.js"></script><img srcset="x 1x, http://d 2x">'
        '<style>@import "https://e";</style><p style="background: url(https://f)"><a href="https://g">text</a>'
    )
    found = Elements(page)
    assert outside(found.loaded) == ["https://a", "//b/c.js", "http://d"]
    assert [u for text in found.styles for u in styles_outside(text)] == ["https://e", "https://f"]


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    found: ModuleType = load_config(str(ROOT / "mkdocs.yml")).plugins["scripts/docs_hooks.py"]  # type: ignore[assignment]
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_an_anchor(site: Path, hooks: ModuleType, package: str) -> None:
    ids = Elements((site / hooks.PACKAGE_PAGES[package]).with_suffix(".html")).ids
    names = {f"{m}.{name}" for m in public_modules(package) for name in public_names(m) or ()}
    assert names - ids == set()


def test_the_navigation_has_its_sections_and_pages(site: Path) -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert [next(iter(section)) for section in nav] == SECTIONS
    lacking = [page for page in _pages(nav) if not (site / page).with_suffix(".html").exists()]
    assert lacking == []


def _pages(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for below in nav.values() if isinstance(nav, dict) else nav:
            yield from _pages(below)


def test_pages_are_few_and_short(hooks: ModuleType) -> None:
    """Generated files may be longer; their first lines say what writes them."""
    pages = list(_pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert len(pages) == len(set(pages)) <= MOST_PAGES
    lengths = {}
    for page in set(pages) - hooks.REPORTS.keys():
        files = hooks.MOUNTED.get(page, (f"docs/{page}",))
        # references of packages are searched, not read from top to bottom
        read = [file for file in files if not file.startswith("docs/internals/")]
        texts = [(ROOT / file).read_text() for file in read]
        lengths[page] = sum(len(text.splitlines()) for text in texts if not is_generated(text))
    assert {page: length for page, length in lengths.items() if length > MOST_LINES} == {}


def is_generated(text: str) -> bool:
    head = "\n".join(text.splitlines()[:20])
    by = r"(generated|written|made) (by|from)|` writes (this page|it|them)|--write\b"
    return bool(re.search(by, head, re.IGNORECASE))


def test_only_data_that_a_page_links_to_is_on_the_site(site: Path) -> None:
    found = {path.name for path in site.rglob("data/**/*") if path.is_file()}
    text = "".join(page.read_text(encoding="utf-8") for page in site.rglob("*.html"))
    assert found == set(re.findall(r'href="(?:\.\./)?data/([^"]+)"', text))
    assert "null-gpu-proofs.json" in found
    assert "equivalence.json" not in found


# ---- mistakes that fail the build


class Small:
    """A site of one page, docs/index.md, with the hooks of the large one."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / "docs").mkdir()
        file = folder / "mkdocs.yml"
        settings = {"site_name": "small", "theme": "mkdocs", "plugins": [], "hooks": [str(HOOKS)]}
        file.write_text(yaml.safe_dump(settings))
        self.config = load_config(str(file), strict=True)
        self.page, self.built = folder / "docs/index.md", folder / "site/index.html"
        self.hooks: ModuleType = self.config.plugins[str(HOOKS)]  # type: ignore[assignment]
        for name in ("MOUNTED", "PACKAGES", "DIAGRAMS", "REPORTS"):
            monkeypatch.setattr(self.hooks, name, {})

    def build(self, text: str) -> str:
        """The HTML of the page."""
        self.page.write_text(text)
        build(self.config)
        return self.built.read_text()


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Small:
    return Small(tmp_path, monkeypatch)


def test_links_to_other_files_are_paths_or_links_of_the_repository(small: Small) -> None:
    text = "[the tests](../tests/lanes), [mkdocs.yml](../mkdocs.yml), [itself](index.md), [web](https://a)"
    page = small.build(text)
    assert "<span>the tests</span> (<code>tests/lanes</code>)" in page
    assert "<code>mkdocs.yml</code>, <a" in page
    assert '<a href="https://a">web</a>' in page
    small.config.repo_url = "https://host/forge"
    page = small.build(text)
    assert '<a href="https://host/forge/blob/HEAD/tests/lanes">the tests</a>' in page


def test_files_of_one_page_have_their_links_and_no_heading_in_common(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = small.page.parent
    monkeypatch.setattr(small.hooks, "ROOT", folder.parent)
    monkeypatch.setattr(small.hooks, "MOUNTED", {"index.md": ("docs/index.md", "docs/second.md")})
    (folder / "second.md").write_text("# Second\n\n## Part\n\n```bash\n# code\n```\n")
    (folder / "third.md").write_text("[title](second.md), [part](second.md#part)\n")

    page = small.build("# First\n\n[title](second.md)\n")
    headings = re.findall(r'<h([123]) id="(\w+)"', page)
    assert headings == [("1", "first"), ("2", "second"), ("3", "part")]
    third = (small.built.parent / "third/index.html").read_text()
    found = re.findall(r'href="[^"]*#(\w+)">(title|part)</a>', page + third)
    assert found == [("second", "title"), ("second", "title"), ("part", "part")]
    with pytest.raises(Abort):  # prose: the build fails
        small.build("# First\n\n## Part\n")


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("[a](nowhere.md)", "docs/nowhere.md"),
        ("[a](../tests/nowhere.py)", "tests/nowhere.py"),
        ("![a](../mkdocs.yml)", "mkdocs.yml"),
        ("[a](../../outside.md)", "../outside.md"),
    ],
)
def test_a_broken_link_fails_the_build(
    small: Small, caplog: pytest.LogCaptureFixture, text: str, target: str
) -> None:
    with pytest.raises(Abort):  # prose: the warning is asserted
        small.build(text)
    warned = [r.getMessage() for r in caplog.records if r.name == "mkdocs.hooks.forge"]
    assert [target in message for message in warned] == [True]


def test_an_anchor_that_is_not_there_fails_the_build(
    small: Small, caplog: pytest.LogCaptureFixture
) -> None:
    small.config.validation.links.anchors = logging.WARNING
    with pytest.raises(Abort):  # prose: the warning is asserted
        small.build("[a](index.md#there)\n\n## Here\n")
    assert "#there" in caplog.text


def test_a_public_name_without_a_docstring_fails_the_build(
    small: Small, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "forge_planted"
    package.mkdir()
    (package / "__init__.py").write_text(
        '__all__ = ["Base", "Derived", "told", "untold"]\n'
        'class Base:\n    """A class."""\n    def run(self):\n        """Run it."""\n'
        'class Derived(Base):\n    """A class."""\n    def run(self): ...\n    def stop(self): ...\n'
        'def told():\n    """Return nothing."""\ndef untold(): ...\n'
    )
    planted = {"forge_planted": package}
    monkeypatch.setattr(small.hooks, "PACKAGES", planted)
    monkeypatch.setattr(sys.modules["write_api_pages"], "PACKAGES", planted)
    with pytest.raises(Abort):  # prose: the warning is asserted
        small.build("text")
    warned = [r.args or r.getMessage() for r in caplog.records if "docstring" in r.getMessage()]
    assert [str(w).split()[0] for w in warned] == [
        "forge_planted.Derived.stop",
        "forge_planted.untold",
    ]


def test_lists_and_fences_are_read_as_on_a_code_host(small: Small) -> None:
    text = "Text\n- one\n\n  more\n- two\n  - below\n- three\n\n```python no-run\n- code\n```\n"
    page = re.sub(r"\s", "", small.build(text))
    assert "<li><p>one</p><p>more</p></li><li><p>two</p><ul><li>below</li></ul></li><li>" in page
    assert '<codeclass="language-python">-code</code>' in page


# ---- diagrams


@pytest.mark.parametrize("name", DIAGRAMS)
def test_the_committed_diagram_is_the_one_that_is_drawn(site: Path, name: str) -> None:
    """Run: hatch run dev:python scripts/write_diagrams.py"""
    committed = (ROOT / f"docs/{name}.svg").read_text(encoding="utf-8")
    light, dark = DIAGRAMS[name](), DIAGRAMS[name](dark=True)
    assert texts(committed) == texts(light) == texts(dark)
    assert light == DIAGRAMS[name]()
    for variant, drawn in ((f"{name}.svg", light), (f"{name}-dark.svg", dark)):
        assert (site / variant).read_text(encoding="utf-8") == drawn


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)
