"""Hooks of mkdocs (`hooks:` in mkdocs.yml) that build the site from files where they are.

- Files of the repository (`MOUNTED`) become pages of the site without copies in docs/; several files may be one page.
- Relative links are those of the repository. A link to a page becomes a link of the site; to another file, a link below
  `repo_url`, or its path as code where there is none. A link that leads nowhere is a warning, and `strict` fails the build.
- Reports of recorded runs (`REPORTS`) are written by the present forge-lab: pages of their own, which load nothing.
- The page of a package is its README and the names in its `__all__`; one without a docstring is a warning.
- Diagrams of scripts/write_diagrams.py are drawn in a light and a dark variant.
"""

from __future__ import annotations

import logging
import posixpath
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from urllib.parse import unquote, urlsplit
from xml.etree.ElementTree import Element

from markdown import Extension, Markdown  # type: ignore[import-untyped]
from markdown.treeprocessors import Treeprocessor  # type: ignore[import-untyped]
from markdown.util import AMP_SUBSTITUTE, AtomicString  # type: ignore[import-untyped]
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify  # type: ignore[import-untyped]
from write_api_pages import PACKAGES, definition, public_modules, public_names, tree, undocumented
from write_diagrams import DIAGRAMS

from forge_lab.report.page import write_page

ROOT = Path(__file__).resolve().parent.parent
log = logging.getLogger("mkdocs.hooks.forge")

#: {package: its page}.
PACKAGE_PAGES = {package: f"packages/{package.replace('_', '-')}.md" for package in PACKAGES}
#: Pages of the site that are other files, or several: {page: files}. The first file has the title of the page.
MOUNTED = {
    "benchmarks.md": ("docs/benchmarks.md", "docs/h200.md"),
    "configuration.md": ("docs/configuration.md", "docs/environment-variables.md"),
    "contributing.md": ("CONTRIBUTING.md", "SECURITY.md"),
    "equivalence.md": ("docs/equivalence.md", "docs/reshard.md"),
    "examples.md": ("examples/README.md",),
    "faq.md": ("docs/faq.md", "docs/exit-codes.md"),
    "models.md": ("docs/models.md", "docs/torch-versions.md"),
    "null-gpu.md": ("docs/null-gpu.md", "docs/null-gpu-sizes.md", "docs/null-gpu-memory.md",
                    "docs/null-gpu-layouts.md", "docs/null-gpu-matrix.md"),
    "optimizers.md": ("docs/optimizers.md", "docs/scaling-study.md"),
    "reliability.md": ("docs/reliability.md", "docs/known-failures.md"),
    "slurm.md": ("docs/slurm.md", "docs/slurm-story.md"),
    "vlm-learning.md": ("docs/vlm-learning.md", "docs/vlm-matched-loss.md"),
    **{page: (f"{PACKAGES[package].parents[1].relative_to(ROOT)}/README.md",
              *(str(f.relative_to(ROOT)) for f in (ROOT / "docs/internals").glob(Path(page).name)),
              f"docs/data/api/{package}.txt")
       for package, page in PACKAGE_PAGES.items()},
}  # fmt: skip
#: Reports of recorded runs: {page: (folder, command that records it)}. A link to the folder leads to the page.
REPORTS = {"demo-report.html": ("docs/data/demo-run", "python scripts/record_demo_run.py")}
_ITEM = re.compile(r" *(?:[-*+]|\d+\.) +(?=\S)")
_FENCE = re.compile(r" *(`{3,})([\w-]*)")


# ---- events of mkdocs


def on_config(config: MkDocsConfig) -> None:
    """Give headings the anchors of code hosts, and rewrite links while pages are rendered."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    config.extra["repository_links"] = links = RepositoryLinks()
    config.markdown_extensions.append(links)


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add mounted pages and diagrams."""
    for page, sources in MOUNTED.items():
        for source in sources:
            if alone := files.get_file_from_path(source.removeprefix("docs/")):
                files.remove(alone)
        files.append(File.generated(config, page, content=joined(page, sources)))
    for package in PACKAGES:
        for name in undocumented(package):
            log.warning(f"{name} is public and has no docstring; write one")

    for page, (folder, command) in REPORTS.items():
        files.append(File.generated(config, page, content=report_page(folder, command)))

    for name, draw in DIAGRAMS.items():
        for variant in (f"{name}.svg", f"{name}-dark.svg"):
            if drawn := files.get_file_from_path(variant):
                files.remove(drawn)  # the committed one
            text = draw(dark=variant.endswith("-dark.svg"))
            files.append(File.generated(config, variant, content=text))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Set the page whose links are rewritten next, and adapt its text to python-markdown."""
    config.extra["repository_links"].begin_page(page.file, files, config.repo_url)
    return for_python_markdown(markdown)


# ---- pages of several files


def text_of(source: str) -> str:
    """The text of a file of the repository; of a list of public names, the entries of its package."""
    if source.startswith("docs/data/api/"):
        return api_page(Path(source).stem)
    return (ROOT / source).read_text(encoding="utf-8")


def joined(page: str, sources: tuple[str, ...]) -> str:
    """The text of a page: the files one after another, with the headings of all but the first one level lower."""
    first, *others = map(text_of, sources)
    folder = posixpath.dirname(sources[0])
    others = [
        with_moved_links(text, posixpath.dirname(source), folder)
        for text, source in zip(others, sources[1:])
    ]
    anchors = [anchors_of(text) for text in (first, *others)]
    for anchor, number in Counter(chain.from_iterable(anchors)).items():
        if number > 1:
            log.warning(
                f"{page}: files of {', '.join(sources)} have the heading #{anchor} in common"
            )
    return "\n\n".join([first, *map(with_lower_headings, others)])


def with_lower_headings(text: str) -> str:
    return "".join(f"#{part}" if heading else part for heading, part in _parts(text))


def with_moved_links(text: str, folder: str, to: str) -> str:
    """The text of a file in `folder` with relative links that lead to the same files from the folder `to`."""

    def moved(found: re.Match[str]) -> str:
        url = found["url"]
        if url is None or not _is_relative(url):
            return found[0]
        return f"]({posixpath.relpath(posixpath.join(folder, url), to or '.')}"

    fences_or_links = r"^```.*?^```$|`[^`\n]*`|\]\((?P<url>[^()#\s]+)"
    return re.sub(fences_or_links, moved, text, flags=re.DOTALL | re.MULTILINE)


def anchors_of(text: str) -> set[str]:
    """Anchors of the headings of a file; that of its title is the first."""
    to_anchor = slugify(case="lower")
    return {
        to_anchor(part.strip("# \n").replace("`", ""), "-")
        for heading, part in _parts(text)
        if heading
    }


def title_anchor(source: str) -> str:
    title = next(part for heading, part in _parts(text_of(source)) if heading)
    return next(iter(anchors_of(title)))


def _parts(text: str) -> Iterator[tuple[bool, str]]:
    """(whether it is a heading, line) of each line, without those in code."""
    inside = False
    for line in text.splitlines(keepends=True):
        inside ^= line.lstrip().startswith("```")
        yield not inside and line.startswith("#"), line


# ---- Markdown as code hosts read it


def for_python_markdown(text: str) -> str:
    """The text with lists and fences that python-markdown reads as code hosts do.

    It needs four blanks for each level of a list, one word after a fence, and an empty line before a list, before an item
    that follows several paragraphs, and before an item of an outer list that follows such an item.
    """
    lines: list[str] = []
    inside: list[int] = []  # the columns where the texts of the open list items begin
    fence, before = "", ""
    new_block = True  # an item here needs an empty line before it
    level = 0  # number of lists around the block
    for line in text.split("\n"):
        column = len(line) - len(line.lstrip())
        item = None if fence else _ITEM.match(line)
        if line.strip() and not fence:
            while inside and column < inside[-1]:
                inside.pop()
        if item and before.strip() and (new_block or len(inside) < level):
            lines.append("")
            level = len(inside)
        if not before.strip():
            level = len(inside)

        indent = " " * (4 * len(inside) + column - (inside[-1] if inside else 0))
        lines.append(indent + line.lstrip() if line.strip() else line)
        if item:
            inside.append(item.end())
        if opened := _FENCE.match(line):
            lines[-1] = lines[-1] if fence else f"{indent}{opened[1]}{opened[2]}"
            fence = "" if fence == opened[1] else fence or opened[1]
        new_block = not item and (new_block or not inside or not line.strip() or bool(opened))
        before = line
    return "\n".join(lines)


# ---- links


class RepositoryLinks(Extension, Treeprocessor):
    """Turns relative links of the repository into links of the site, before mkdocs resolves these."""

    def extendMarkdown(self, md: Markdown) -> None:
        # After inline patterns (20) and before mkdocs' own links (0).
        md.treeprocessors.register(self, "repository_links", priority=10)

    def begin_page(self, file: File, files: Files, repo_url: str | None) -> None:
        """Set the page that is rendered next."""
        self.file, self.files, self.repo_url = file, files, repo_url
        self.source, *_ = MOUNTED.get(file.src_uri, (f"docs/{file.src_uri}",))
        self.pages = {f"docs/{f.src_uri}": (f, "") for f in files}
        for page, sources in MOUNTED.items():
            if found := files.get_file_from_path(page):
                first, *others = sources
                self.pages |= {first: (found, ""), posixpath.dirname(first) or first: (found, "")}
                self.pages |= {source: (found, title_anchor(source)) for source in others}
        for page, (folder, _) in REPORTS.items():
            if report := files.get_file_from_path(page):
                self.pages[folder] = (report, "")

    def run(self, root: Element) -> None:
        for cell in root.iter("td"):
            for code in cell.iter("code"):  # a bar in a table is written with a backslash
                code.text = AtomicString((code.text or "").replace("\\|", "|"))
        for parent in root.iter():
            for place, element in enumerate(list(parent)):
                attribute = {"a": "href", "img": "src"}.get(element.tag)
                if attribute and _is_relative(url := element.get(attribute, "")):
                    parent[place] = self.rewrite(element, attribute, url)

    def rewrite(self, element: Element, attribute: str, url: str) -> Element:
        """The element with a link of the site, or what stands for it."""
        parts = urlsplit(url)
        target = posixpath.normpath(
            posixpath.join(posixpath.dirname(self.source), unquote(parts.path))
        )
        found, anchor = self.pages.get(target, (None, ""))
        if found and found.inclusion.is_excluded() and target.startswith("docs/data/"):
            found.inclusion = InclusionLevel.INCLUDED  # data that a page links to
        if found and not found.inclusion.is_excluded():
            here = posixpath.dirname(self.file.src_uri) or "."
            to, fragment = posixpath.relpath(found.src_uri, here), parts.fragment or anchor
            element.set(attribute, f"{to}#{fragment}" if fragment else to)
            return _variants(element) if attribute == "src" else element

        if target.startswith("../") or not (ROOT / target).exists():
            log.warning(f"{self.source} links to {url}: there is no {target}")
            return element
        if attribute == "src":
            log.warning(f"{self.source} shows {url}: {target} is not on the site; move it to docs/")
            return element
        if self.repo_url:
            element.set(attribute, f"{self.repo_url.rstrip('/')}/blob/HEAD/{target}")
            return element
        return _as_code(element, target)


def _is_relative(url: str) -> bool:
    parts = urlsplit(url)
    mail = AMP_SUBSTITUTE in url  # python-markdown writes addresses as entities
    return bool(parts.path) and not (parts.scheme or parts.netloc or mail or url.startswith("/"))


def _as_code(link: Element, target: str) -> Element:
    """`text (path)`, or only the path where the text repeats it."""
    text = "".join(link.itertext())
    code = Element("code")
    code.text = target
    if target.endswith(text.strip("/")):
        code.tail = link.tail
        return code

    link.tag, tail = "span", link.tail
    link.attrib.clear()
    span = Element("span")
    span.append(link)
    span.append(code)
    link.tail, code.tail, span.tail = " (", ")", tail
    return span


def _variants(image: Element) -> Element:
    """Both variants of a diagram, of which the theme shows one; other images as they are."""
    source = image.get("src", "")
    if posixpath.basename(source).removesuffix(".svg") not in DIAGRAMS:
        return image
    both = Element("span", {"class": "diagram"})
    both.tail = image.tail
    for name in (f"{source}#only-light", f"{source.removesuffix('.svg')}-dark.svg#only-dark"):
        both.append(Element("img", {**image.attrib, "src": name}))
    return both


# ---- reports


def report_page(folder: str, command: str) -> str:
    """The page that `forge-train report` writes of a recorded run, with a line that says where it comes from."""
    with tempfile.TemporaryDirectory() as temporary:
        page = write_page([ROOT / folder], Path(temporary, "report.html"))
        text = page.read_text(encoding="utf-8")
    again = f"forge-train report {folder} --output report.html"
    note = f'<a href="index.html">Forge</a>: recorded by <code>{command}</code>, written by <code>{again}</code>'
    return text.replace("<nav>", f'<p class="note">{note}</p>\n<nav>', 1)


# ---- API pages


def api_page(package: str) -> str:
    """Markdown with an entry of mkdocstrings for each public name; a name of several modules has one entry, in the first."""
    lines = [f"# Python API of {package}", "", f"Generated from the docstrings of `{package}`.", ""]
    first: dict[tuple[str, int], str] = {}
    for module in public_modules(package):
        lines += [*_entry(module, 3, members=False), ""]
        also = []
        for name in public_names(module) or ():
            path, found = f"{module}.{name}", definition(module, name)
            if found is None:  # a submodule, with a section of its own
                also.append(f"[`{name}`][{path}]")
            elif (key := (found[0], found[1].lineno)) in first:
                anchor = f'<a id="{path}"></a>' if path != first[key] else ""
                also.append(f"{anchor}[`{name}`][{first[key]}]")
            else:
                # Where a submodule has the same name, griffe finds that one: the section of the module.
                first[key] = f"{found[0]}.{name}" if tree(path) else path
                if tree(path) and public_names(path) is None:
                    lines += [f'<a id="{path}"></a>', ""]
                lines += [*_entry(first[key], 4), ""]
        if also:
            lines += [f"Also in `{module}`: {', '.join(also)}.", ""]
    return "\n".join(lines)


def _entry(path: str, level: int, members: bool = True) -> list[str]:
    options = [f"heading_level: {level}", f"show_root_full_path: {str(not members).lower()}"]
    options += [] if members else ["members: false"]
    return [f"::: {path}", "    options:", *(f"      {option}" for option in options)]
