"""Write examples/notebooks/*.ipynb from the scripts beside them, without outputs.

    hatch run dev:notebooks

A cell begins with `# %%` (text: `# %% [markdown]`). Scripts are what people read and change; notebooks are what they open.
"""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "examples/notebooks"


def notebook_of(script: Path) -> str:
    """The notebook of a script, the same text each time."""
    import jupytext
    import nbformat

    found = jupytext.reads(script.read_text(encoding="utf-8"), fmt="py:percent")
    for number, cell in enumerate(found.cells):
        cell["id"] = f"cell-{number}"
        cell["metadata"] = {}
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    found.metadata = nbformat.from_dict({"kernelspec": kernel})
    nbformat.validate(found)
    return str(nbformat.writes(found)) + "\n"


def main() -> int:
    """Write all; 0."""
    for script in sorted(FOLDER.glob("*.py")):
        script.with_suffix(".ipynb").write_text(notebook_of(script), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
