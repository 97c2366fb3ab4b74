"""The blocks of README, CONTRIBUTING, package READMEs and Start pages run as printed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.documents import blocks

#: Blocks of all pages with `<!-- not run: ... -->`; lower it when one goes.
MOST_NOT_RUN = 5


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
    found = [block for page in blocks.PAGES for block in blocks.blocks_of(page)]
    assert [b for b in found if b.language not in (*blocks.RUN, *blocks.SHOWN)] == []
    left_out = [f"{b.page}:{b.line}: {b.reason}" for b in found if b.reason]
    assert len(left_out) <= MOST_NOT_RUN, left_out


@pytest.mark.parametrize(
    ("code", "language"), [("false", "bash"), ("hatch run no_such_program", "bash"), ("pip install ./packages/nothing", "bash"),
                           ("hatch run mutations --no-such-option", "bash"), ("undefined_name", "python")]
)  # fmt: skip
@pytest.mark.slow
@pytest.mark.lane("ci")
def test_a_block_that_fails_is_an_error(
    code: str, language: str, home: Path, tmp_path: Path
) -> None:
    reader = blocks.Reader(home, tmp_path, tmp_path)
    with pytest.raises(blocks.BlockError):  # prose: its text is the output of the block
        reader.read(blocks.Block("page.md", 1, language, code, None))
    reader.close()
