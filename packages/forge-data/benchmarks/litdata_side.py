"""litdata over the tokens of a file, for `data.py --litdata`; runs in an environment that has it.

    python litdata_side.py TOKENS.bin FOLDER SEQ_LEN BATCH WORKERS

Writes its chunks into FOLDER if it is empty. Then each line of stdin, a number of batches, is answered by a line of wall
and processor seconds (of this process) that reading them took.
"""

from __future__ import annotations

import os
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize

_PIECE = 2**22  # tokens that are written in one go


class Pieces:
    """Consecutive tokens of the file, as `optimize` asks for them."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, start: int) -> Any:
        tokens = np.memmap(self.path, np.uint16, mode="r")
        yield torch.from_numpy(tokens[start : start + _PIECE].astype(np.uint16))


def main() -> None:
    # a batch of int64 is just large enough for threads of torch, whose waiting would be counted
    torch.set_num_threads(1)
    path, folder, seq_len, batch, workers = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
    block = TokensLoader(block_size=seq_len + 1)
    if not Path(folder).exists():
        count = Path(path).stat().st_size // 2
        size = (2**26 // 2 // (seq_len + 1)) * (seq_len + 1)  # 64 MB in whole rows
        # optimize prints its progress to stdout, which is a protocol here
        out, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        optimize(
            fn=Pieces(path),
            inputs=list(range(0, count, _PIECE)),
            output_dir=folder,
            chunk_size=size,
            item_loader=block,
            num_workers=1,
        )
        os.dup2(out, 1)
    rows = StreamingDataset(
        folder, item_loader=TokensLoader(block_size=seq_len + 1), shuffle=True, seed=0
    )
    loader = StreamingDataLoader(rows, batch_size=batch, num_workers=workers)
    batches = iter(loader)
    list(islice(batches, 4))
    print("ready", len(rows), flush=True)
    for line in sys.stdin:
        began, busy = time.perf_counter(), time.process_time()
        for ids in islice(batches, int(line)):
            ids = ids.long()
            ids[:, :-1], ids[:, 1:]
        print(time.perf_counter() - began, time.process_time() - busy, flush=True)


if __name__ == "__main__":
    main()
