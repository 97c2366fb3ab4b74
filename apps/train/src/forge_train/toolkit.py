"""What another application builds on: a job's model, data, loss and evaluations without a Trainer.

    with init_ranks(job.parallel) as meshes:
        model, _, _ = load_model("runs/mine", parallel=job.parallel, meshes=meshes)
        compute = job_compute(model, job, meshes)

forge-lab uses these names; a name that it no longer needs goes.
"""

from __future__ import annotations

from forge_train.config.structure import structure_table
from forge_train.loop.guard import skip_windows
from forge_train.plan import price
from forge_train.process import init_ranks
from forge_train.run.rows import finite
from forge_train.trainer.assemble import job_compute
from forge_train.trainer.begin_tokens import begin_texts_as, run_layers
from forge_train.trainer.build import Course, build_trained
from forge_train.trainer.checkpoints import IMPORTED, store_errors
from forge_train.trainer.data import open_held_out, run_tokenizer, tokenizer_of
from forge_train.trainer.evaluation import Evaluation, prompts_of
from forge_train.trainer.layout import require_layout
from forge_train.trainer.run_directory import is_fixed

__all__ = [
    "IMPORTED",
    "Course",
    "Evaluation",
    "begin_texts_as",
    "build_trained",
    "finite",
    "init_ranks",
    "is_fixed",
    "job_compute",
    "open_held_out",
    "price",
    "prompts_of",
    "require_layout",
    "run_layers",
    "run_tokenizer",
    "skip_windows",
    "store_errors",
    "structure_table",
    "tokenizer_of",
]
