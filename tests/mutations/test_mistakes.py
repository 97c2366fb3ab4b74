"""The mistakes of `hatch run mutations` fit the tree as it stands; planting them is that command's."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import hits
import rejections
from mistakes import MISTAKES, Mistake

pytestmark = pytest.mark.lane("test")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_changes_one_place_and_leaves_python(mistake: Mistake) -> None:
    text = (ROOT / mistake.file).read_text()
    assert text.count(mistake.right) == 1, mistake.file
    ast.parse(text.replace(mistake.right, mistake.wrong))


def test_each_has_a_name_of_its_own_and_each_package_has_ten() -> None:
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES)
    counts = Counter("/".join(mistake.file.split("/")[:2]) for mistake in MISTAKES)
    folders = {str(p.relative_to(ROOT)) for p in [*ROOT.glob("packages/*"), *ROOT.glob("apps/*")]}
    assert counts.keys() == folders
    assert min(counts.values()) >= 10


SOURCE = '''"""A module."""
from __future__ import annotations

LIMIT = 3


def above(x: int, least: int = 2) -> bool:
    """Whether x is large."""
    if x < least:
        return False
    elif x > LIMIT:
        return True
    return [y for y in (x,) if y][0] > least


class Box:
    size: int = 4

    def grow(self) -> int:
        def twice() -> int:
            return 2 * self.size

        return twice()
'''


@pytest.mark.parametrize(
    ("text", "call", "seen"),
    [
        ("return False", "above(1)", True),
        ("return False", "above(9)", False),
        ("x > LIMIT", "above(3)", True),
        ("x > LIMIT", "above(1)", False),
        ("if y", "above(3)", True),
        ("2 * self", "Box().grow()", True),
        ("2 * self", "above(1)", False),
    ],
)
def test_a_planted_call_is_made_where_the_text_is_executed(
    tmp_path: Path, text: str, call: str, seen: bool
) -> None:
    names = run_planted(tmp_path, text, call)
    assert ("here" in names) == seen
    assert ("module.py::above" in names) == call.startswith("above")


@pytest.mark.parametrize("text", ["LIMIT = 3", "least: int = 2", "size: int = 4"])
def test_a_line_that_runs_at_import_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    site = hits.Site("here", SOURCE.index(text))
    assert hits.plant(path, "module.py", [site]) == {"here"}


def run_planted(folder: Path, text: str, call: str) -> list[str]:
    """Names of the planted calls that `call` makes."""
    path = folder / "module.py"
    path.write_text(SOURCE)
    assert hits.plant(path, "module.py", [hits.Site("here", SOURCE.index(text))]) == set()
    made: list[str] = []
    planted = path.read_text().replace(f"from {hits.MODULE} import hit as _forge_hit\n", "")
    names: dict[str, object] = {"_forge_hit": made.append, "__name__": "module"}
    exec(planted, names)
    exec(call, names)
    return made


def test_the_first_changed_character_is_found() -> None:
    text = "a = 1\nb = one + two\n"
    assert hits.first_difference(text, "one + two", "one - two") == text.index("+")
    assert hits.first_difference(text, "one", "one + 1") == text.index("one") + 2


@pytest.mark.parametrize("kind", ["swap", "reword"])
def test_drawn_rejections_are_mistakes_that_leave_python(kind: str) -> None:
    folders = [ROOT / "packages/forge-resilience", ROOT / "packages/forge-ckpt"]
    names: dict[str, tuple[Mistake, ...]] = {}
    exec(rejections.drawn(kind, 12, 3, folders), names)
    assert len(names["MISTAKES"]) == 12
    for mistake in names["MISTAKES"]:
        test_a_mistake_changes_one_place_and_leaves_python(mistake)
