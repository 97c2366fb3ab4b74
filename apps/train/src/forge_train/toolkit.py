"""What another application builds on: a job's model, data, loss and evaluations without a Trainer.

    with init_ranks(job.parallel) as meshes:
        model, _, _ = load_model("runs/mine", parallel=job.parallel, meshes=meshes)
        compute = job_compute(model, job, meshes)

forge-lab uses these names; a name that it no longer needs goes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_train._lazy import import_later

if TYPE_CHECKING:
    from forge_train.config.structure import structure_table
    from forge_train.config.tokenizer import folder_ends
    from forge_train.hf.folder import processor_table
    from forge_train.metrics.rows import finite
    from forge_train.plan import price
    from forge_train.ranks import init_ranks
    from forge_train.sampling import continuation, prompt_ids
    from forge_train.trainer.begin_tokens import begin_texts_as
    from forge_train.trainer.build import build_trained, open_held_out, run_tokenizer
    from forge_train.trainer.compute import job_compute
    from forge_train.trainer.course import Course
    from forge_train.trainer.evaluation import Evaluation
    from forge_train.trainer.exact_match import prompts_of
    from forge_train.trainer.layout import require_layout

__all__ = [
    "Course",
    "Evaluation",
    "begin_texts_as",
    "build_trained",
    "continuation",
    "finite",
    "folder_ends",
    "init_ranks",
    "job_compute",
    "open_held_out",
    "price",
    "processor_table",
    "prompt_ids",
    "prompts_of",
    "require_layout",
    "run_tokenizer",
    "structure_table",
]

_NAMES = {
    "config.structure": "structure_table",
    "config.tokenizer": "folder_ends",
    "hf.folder": "processor_table",
    "metrics.rows": "finite",
    "plan": "price",
    "ranks": "init_ranks",
    "sampling": "continuation prompt_ids",
    "trainer.begin_tokens": "begin_texts_as",
    "trainer.build": "build_trained open_held_out run_tokenizer",
    "trainer.compute": "job_compute",
    "trainer.course": "Course",
    "trainer.evaluation": "Evaluation",
    "trainer.exact_match": "prompts_of",
    "trainer.layout": "require_layout",
}
__getattr__ = import_later(__name__, _NAMES)
