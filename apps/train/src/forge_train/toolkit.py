"""What another application builds on: a job's model, data, loss and evaluations without a Trainer.

    with init_ranks(job.parallel) as meshes:
        model, _, _ = load_model("runs/mine", parallel=job.parallel, meshes=meshes)
        compute = job_compute(model, job, meshes)

forge-lab uses these names; a name that it no longer needs goes.
"""

from __future__ import annotations

from forge_train.build.begin_tokens import begin_texts_as, run_layers
from forge_train.build.build import Course, build_trained, total_steps
from forge_train.build.data import open_held_out, run_tokenizer
from forge_train.build.evaluation import Evaluation, prompts_of
from forge_train.build.layout import require_layout
from forge_train.build.run_directory import is_fixed
from forge_train.config.flags import add_flags
from forge_train.config.imported import DEFAULT_DIR
from forge_train.config.structure import structure_table
from forge_train.loop.assemble import job_compute
from forge_train.plan import price
from forge_train.process import init_ranks
from forge_train.run.checkpoints import IMPORTED, store_errors

__all__ = [
    "DEFAULT_DIR", "IMPORTED", "Course", "Evaluation", "add_flags", "begin_texts_as",
    "build_trained", "init_ranks", "is_fixed", "job_compute", "open_held_out", "price",
    "prompts_of", "require_layout", "run_layers", "run_tokenizer", "store_errors",
    "structure_table", "total_steps",
]  # fmt: skip
