"""The end of a run for a person: the result, the sample, the folder, the next commands."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from forge_core import SamplingConfig
from forge_resilience import ExitCode
from forge_train.loop.start import last_rate
from forge_train.loop.trainer import RunResult, Trainer
from forge_train.sampling import continuation
from forge_train.trainer.build import run_tokenizer


def print_summary(trainer: Trainer, result: RunResult, args: Sequence[str]) -> None:
    """Print the end of a run to stdout; writes sample.txt when the run is done and asks for it.

    `args` are those of `forge-train run`, so that the same command can be shown again. On many ranks
    all of them write the text, each gather of weights needs them, and rank 0 prints.
    """
    done = result.exit_code is ExitCode.DONE
    text, missing = "", ""
    try:  # before any line, which a reader may not wait for
        text = sample_text(trainer) if done else ""
    except Exception as error:  # a full disk, a rank that is gone, no memory: the run is done
        missing = f"no sample: {type(error).__name__}: {error}"
    if trainer.meshes.rank != 0:
        return
    nproc = os.environ.get("FORGE_NPROC")  # what `--nproc` was, if it started us
    args = [*args, "--nproc", nproc] if nproc else args
    ranks = f" --nproc {nproc}" if nproc else ""
    command = "hatch run forge-train" if "HATCH_ENV_ACTIVE" in os.environ else "forge-train"
    run_dir = shlex.quote(str(trainer.paths.path))
    print()
    if not done:
        print(f"stopped and saved at step {result.step} of {trainer.total_steps}")
        print(f"\nrun directory  {trainer.paths.path}")
        print(f"\nto go on\n  {command} run {shlex.join(args)}")
        return
    print(f"done: step {result.step} of {trainer.total_steps}")
    if result.val_loss is not None:
        print(f"validation loss {result.val_loss:.4f} nats per token")
    if trainer.config.sample.max_new_tokens and is_cut(trainer):
        print(
            "no sample: with tp, cp or pp no rank has the whole model; generate reads the checkpoint"
        )
    if missing:
        print(missing)
    if text:
        print(f"\n--- sample\n{text}\n---")
    resolved = shlex.quote(str(trainer.paths.config))
    print(f"\nrun directory  {trainer.paths.path}\n\nnext")
    if trainer.config.sample.max_new_tokens:
        print(f"  {command} generate {run_dir} --prompt 'The '")
    longer = 2 * trainer.total_steps
    last = last_rate(trainer.paths, result.step)
    rates = (
        f"; the learning rate goes from {last[1]:.4g} to {trainer.run.next_rate(longer):.4g}"
        if last
        else ""
    )
    print(f"  {command} run {resolved}{ranks} --train.steps {longer}   # go on from here{rates}")
    other = shlex.quote(f"{trainer.paths.path}-2")
    print(
        f"  {command} run {resolved}{ranks} --run.dir {other} --optimizer.lr 1e-3   # another run"
    )


def is_cut(trainer: Trainer) -> bool:
    """True where no rank could run the model by itself: its matrices, sequences or depth are cut."""
    meshes = trainer.meshes
    return max(meshes.tp.size, meshes.cp.size, meshes.pp.size) > 1


def sample_text(trainer: Trainer) -> str:
    """The configured sample of the trained model, also written to sample.txt."""
    sample = trainer.config.sample
    if not sample.max_new_tokens or is_cut(trainer):
        return ""
    sampling = SamplingConfig(temperature=sample.temperature, seed=trainer.config.run.seed)
    pieces = continuation(
        trainer.model,
        run_tokenizer(trainer.config),
        sample.prompt,
        sample.max_new_tokens,
        sampling,
        trainer.run.device,
    )
    text = sample.prompt + "".join(pieces)
    if trainer.meshes.rank == 0:
        trainer.paths.sample.write_text(text + "\n", encoding="utf-8")
    return text
