"""Write docs/metrics.md from the list of columns: hatch run python scripts/write_metrics_page.py"""

from __future__ import annotations

from pathlib import Path

from forge_train.metrics.columns import COLUMNS, SCHEMA, tracker_name

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
HEAD = f"""# Columns of metrics.jsonl

Generated from `forge_train.metrics.columns`. A row is one JSON object in a line; `forge_train.read_run(run).metrics`
has a list for each column. A value that is not finite is null. A row has no columns of parts that the job does not
use. `<...>` stands for a name in the configuration, or the number of a layer or an expert. This is schema {SCHEMA}: the number grows
when a column changes its meaning, not when a column is added. Rows without `schema` were written before there was one, and mean the
same.

The trackers (`tensorboard`, `wandb` and `mlflow` of [metrics.sinks]) plot the columns of a section together: they get the name in the
second column. Columns of extensions are in the section `extension`. Your own sinks, reports and `metrics.jsonl` have the name in the
first column. `metrics.flat_names = true` gives that name to the trackers, too, as version 0.1 did, for instance so that a run of that
version goes on in the same plots; it is deprecated and removed in 0.3.0.

"""


def page() -> str:
    """The text of docs/metrics.md."""
    lines = ["| column | in trackers | unit | range | meaning |", "|---|---|---|---|---|"]
    for column in COLUMNS:
        name, tracked = (
            column.name,
            f"`{tracker_name(column.name)}`"
            if column.section
            else "the x axis"
            if column.name == "step"
            else "",
        )
        lines.append(
            f"| `{name}` | {tracked} | {column.unit} | {column.range} | {column.meaning} |"
        )
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
