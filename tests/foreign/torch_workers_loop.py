"""A loop of plain torch with two workers of DataLoader, which goes on from a file: torch_workers_loop.py FILE STEPS"""

import json
import sys
from pathlib import Path

from torch.utils.data import DataLoader

from forge_data import BuiltinCorpus, Loader, PackedStream

file, steps = Path(sys.argv[1]), int(sys.argv[2])
loader = Loader(PackedStream(BuiltinCorpus("validation"), 16, seed=0), global_batch=2)
if file.exists():
    loader.load_state_dict(json.loads(file.read_text()))
for _, batch in zip(range(steps), DataLoader(loader, batch_size=None, num_workers=2)):
    print(*batch.instance_ids.tolist(), batch.digest)
file.write_text(json.dumps(loader.state_dict(after=batch)))
