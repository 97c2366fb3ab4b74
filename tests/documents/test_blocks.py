"""The blocks of README, CONTRIBUTING, package READMEs and Start pages run as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.documents import blocks

#: Of the blocks that could run, on all pages, at most this fraction has a line `<!-- not run: ... -->`.
MOST_NOT_RUN = 0.1


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = blocks.make_environment(tmp_path_factory.mktemp("wheels"))
    blocks.require_main_job(made)
    return made


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize("page", blocks.PAGES)
def test_the_blocks_of_a_page_run(page: str, home: Path, tmp_path: Path) -> None:
    blocks.run_page(page, home, tmp_path)


def test_blocks_name_a_language_and_few_are_left_out() -> None:
    found = [block for page in blocks.pages() for block in blocks.blocks_of(page)]
    assert [b for b in found if b.language not in (*blocks.RUN, *blocks.SHOWN)] == []
    left_out = [block for block in found if block.reason is not None]
    assert [b for b in left_out if not b.reason.startswith(blocks.REASONS)] == []
    assert {block.language for block in left_out} <= set(blocks.RUN)
    could_run = [block for block in found if block.language in blocks.RUN]
    assert len(left_out) <= MOST_NOT_RUN * len(could_run), left_out


def test_code_of_a_page_is_in_fences() -> None:
    """Indented code names no language; a mark that is not directly before a fence leaves nothing out."""
    for page in blocks.pages():
        text = (blocks.ROOT / page).read_text()
        assert len(blocks.blocks_of(page)) * 2 == len(re.findall(r"^ *(?:```|~~~)", text, re.M)), (
            page
        )
        marks = len(re.findall(r"^<!-- (?:not run|needs Slurm)", text, re.M))
        assert marks == sum(bool(b.reason) or b.needs_slurm for b in blocks.blocks_of(page)), page

        prose = re.sub(r"^```.*?^```$", "```", text, flags=re.DOTALL | re.MULTILINE)
        assert re.findall(r"\n\n {4}.*", prose) == [], page


@pytest.mark.parametrize(
    ("code", "language"), [("false", "bash"), ("hatch run no_such_program", "bash"), ("pip install ./packages/nothing", "bash"),
                           ("hatch run mutations --no-such-option", "bash"), ("undefined_name", "python"), ("print(1 + 1)  # 3, a sum", "python")]
)  # fmt: skip
@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_block_that_fails_is_an_error(
    code: str, language: str, home: Path, tmp_path: Path
) -> None:
    reader = blocks.Reader(home, tmp_path, tmp_path)
    with pytest.raises(blocks.BlockError):  # prose: its text is the output of the block
        reader.read(blocks.Block("page.md", 1, language, code))
    reader.close()
