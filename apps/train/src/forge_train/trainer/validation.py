"""The rows of an evaluation: the same ones each time, each label once, whatever the number of ranks."""

from __future__ import annotations

import forge_data
from forge_data import Batch, Stream, batch_of
from forge_parallel import Meshes
from forge_resilience import Agreement
from forge_train.errors import DataError, run_on_all_ranks
from forge_train.trainer.store_errors import problems_at


def share_of_rows(
    stream: Stream,
    sequences: int,
    batch_size: int,
    meshes: Meshes,
    agreement: Agreement,
    called: str,
) -> list[Batch]:
    """This rank's part of the first `sequences` rows (all if there are fewer), `batch_size` at a time.

    The rows are divided into the same batches for any number of ranks; each data rank gets equally many of them,
    filler included, as every rank must take part in every gather. All are read before anything is computed:
    if one rank cannot read its own, all raise DataError.
    """
    rows = min(sequences, len(stream))
    each = -(-rows // (batch_size * meshes.batch_size))
    first = each * meshes.batch_rank

    def read() -> list[Batch]:
        try:
            return [
                _rows(stream, range(batch * batch_size, (batch + 1) * batch_size), rows)
                for batch in range(first, first + each)
            ]
        except (forge_data.InvalidData, OSError, ValueError) as error:
            raise DataError(problems_at(error, f"{called} data")) from error

    return run_on_all_ranks(agreement, read)


def _rows(stream: Stream, ids: range, rows: int) -> Batch:
    """Rows `ids`; filler for those from `rows` on."""
    real = range(ids.start, max(ids.start, min(ids.stop, rows)))
    missing = len(ids) - len(real)
    batch = batch_of(stream, real)
    return batch.with_filler(missing) if missing else batch
