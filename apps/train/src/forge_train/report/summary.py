"""The end of a run for a person: the result, the sample, the folder, the next commands."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from forge_core.generate import SamplingConfig, generate_text
from forge_data.tokenizer import prompt_ids
from forge_resilience import ExitCode
from forge_train.build.data import run_tokenizer
from forge_train.loop.start import last_rate
from forge_train.loop.trainer import RunResult, Trainer


def print_summary(trainer: Trainer, result: RunResult, args: Sequence[str]) -> None:
    """Print the end of a run to stdout; writes sample.txt when the run is done and asks for it.

    `args` are those of `forge-train run`, so that the same command can be shown again. On many ranks
    all of them write the text, each gather of weights needs them, and rank 0 prints.
    """
    done, text, missing = result.exit_code is ExitCode.DONE, "", ""
    try:  # before any line, which a reader may not wait for
        text = sample_text(trainer) if done else ""
    except Exception as error:  # a full disk, a rank that is gone, no memory: the run is done
        missing = f"no sample: {type(error).__name__}: {error}"
    if trainer.meshes.rank != 0:
        return

    paths, total, new = trainer.paths, trainer.total_steps, trainer.config.sample.max_new_tokens
    nproc = os.environ.get("FORGE_NPROC")  # what `--nproc` was, if it started us
    ranks = ["--nproc", nproc] if nproc else []
    command = "hatch run forge-train" if "HATCH_ENV_ACTIVE" in os.environ else "forge-train"

    if not done:
        print(
            f"\nstopped and saved at step {result.step} of {total}\n\nrun directory  {paths.path}"
        )
        again = f"{command} run {shlex.join([*args, *ranks])}"
        if args[:1] == [os.path.abspath(paths.path / "slurm/job.toml")]:  # of its batch script
            again = f"sbatch {shlex.quote(str(paths.path / 'slurm/job.sh'))}   # where Slurm does not queue it again"
        print(f"\nto go on\n  {again}")
        return

    print(f"\ndone: step {result.step} of {total}")
    if result.val_loss is not None:
        print(f"validation loss {result.val_loss:.4f} nats per token")
    if new and _is_cut(trainer):
        missing = "no sample: with tp, cp or pp no rank has the whole model; generate reads the checkpoint"
    if missing:
        print(missing)
    if text:
        print(f"\n--- sample\n{text}\n---")

    print(f"\nrun directory  {paths.path}\n\nnext")
    if new:
        print(f"  {command} generate {shlex.quote(str(paths.path))} --prompt 'The '")
    print(f"  {command} report {shlex.quote(str(paths.path))}   # a page of its curves and events")
    rates, again = "", shlex.join(["run", str(paths.config), *ranks])
    if last := last_rate(paths, result.step):
        after = trainer.run.next_rate(2 * total)
        rates = f"; the learning rate goes from {last[1]:.4g} to {after:.4g}"
    print(f"  {command} {again} --train.steps {2 * total}   # go on from here{rates}")
    other, lr = shlex.quote(f"{paths.path}-2"), trainer.config.optimizer.lr / 2
    weights = shlex.quote(f"{paths.path}@0")  # of an import, which is no key of the configuration
    begin = f" --init.from {weights}" if paths.imported.exists() else ""
    if not begin or (paths.checkpoints / "step-00000000").exists():
        print(f"  {command} {again} --run.dir {other}{begin} --optimizer.lr {lr:g}   # another run")


def _is_cut(trainer: Trainer) -> bool:
    """True where no rank could run the model by itself: its matrices, sequences or depth are cut."""
    meshes = trainer.meshes
    return max(meshes.tp.size, meshes.cp.size, meshes.pp.size) > 1


def sample_text(trainer: Trainer) -> str:
    """The configured sample of the trained model, also written to sample.txt."""
    config, sample = trainer.config, trainer.config.sample
    if not sample.max_new_tokens or _is_cut(trainer):
        return ""
    sampling = SamplingConfig(temperature=sample.temperature, seed=config.run.seed)
    tokenizer = run_tokenizer(config)
    ids = prompt_ids(tokenizer, sample.prompt)
    pieces = generate_text(trainer.model, tokenizer, ids, sample.max_new_tokens, sampling)
    text = sample.prompt + "".join(pieces)
    if trainer.meshes.rank == 0:
        trainer.paths.sample.write_text(text + "\n", encoding="utf-8")
    return text
