"""Write docs/metrics.md from the list of columns: hatch run python scripts/write_metrics_page.py"""

from __future__ import annotations

from pathlib import Path

from forge_train.metrics.columns import SCHEMA, columns_as_markdown

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
HEAD = f"""# Columns of metrics.jsonl

Generated from `forge_train.metrics.columns`. A row is one JSON object in a line; `forge_train.read_run(run).metrics`
has a list for each column. A value that is not finite is null. A row has no columns of parts that the job does not
use. `<...>` stands for a name in the configuration, or the number of a layer or an expert. This is schema {SCHEMA}: the number grows
when a column changes its meaning, not when a column is added. Rows without `schema` were written before there was one, and mean the
same.

"""

if __name__ == "__main__":
    PAGE.write_text(HEAD + columns_as_markdown(), encoding="utf-8")
    print(PAGE)
