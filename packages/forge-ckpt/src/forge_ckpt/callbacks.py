"""A Store in the Trainer of transformers and in that of Lightning: one callback for each."""

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from forge_ckpt._shared.problems import invalid
from forge_ckpt.rng import RNGState
from forge_ckpt.stage_state import OptionalObject
from forge_ckpt.store import Store

if TYPE_CHECKING:
    import transformers

__all__ = ["lightning_callback", "transformers_callback"]

logger = logging.getLogger("forge_ckpt")


def transformers_callback(
    path: str | os.PathLike[str],
    every: int = 100,
    seek: Callable[[int], None] | None = None,
    **options: Any,
) -> "transformers.TrainerCallback":
    """Return a callback for `transformers.Trainer` that replaces its own checkpoints (`save_strategy="no"`).

        Trainer(model, arguments, train_dataset=data, callbacks=[transformers_callback("checkpoints", 100, data.seek)]).train()

    Training continues after the newest sound checkpoint at ``path``, with the saved weights, optimizer, schedule and
    random states. It saves every ``every`` steps without waiting for the disk, and waits at the end. All ranks use it.

    The Trainer begins its data anew: ``seek(samples)`` moves the training set, a stream, to the first sample that no
    earlier step has used (a warning without it). ``options`` are those of :class:`forge_ckpt.Store`. Raises ValueError for ``every``
    below 1 and where transformers is not installed.
    """
    _check_every(every)
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise _not_installed("transformers") from error

    class StoreCallback(TrainerCallback):
        """Loads at the start, saves every `every` steps."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            objects = {"optimizer": given["optimizer"], "schedule": given["lr_scheduler"]}
            self.state = {"model": given["model"], **objects, "rng": RNGState()}
            self.store = Store(path, **options)
            step = self.store.load(self.state)
            if step is None:
                return
            state.global_step = step
            if seek is None:
                logger.warning("step %d: the training set begins again at its first sample", step)
                return
            seek(step * args.train_batch_size * args.gradient_accumulation_steps * args.world_size)

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step % every == 0:
                self.store.save(state.global_step, self.state, wait=False)

        def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.store.close()

    return StoreCallback()


def lightning_callback(path: str | os.PathLike[str], every: int = 100, **options: Any) -> Any:
    """Return a callback for `lightning.Trainer` that replaces its own checkpoints (`enable_checkpointing=False`).

        Trainer(callbacks=[lightning_callback("checkpoints", 100)], enable_checkpointing=False).fit(module, loader)

    Training continues after the newest sound checkpoint at ``path``, with the saved weights, optimizers, schedules,
    progress of the loops (with the position of a loader that has a state) and random states. It saves every
    ``every`` steps without waiting for the disk, and waits at the end. All ranks use it. ``options`` are those of
    :class:`forge_ckpt.Store`. Raises ValueError for ``every`` below 1 and where lightning is not installed.
    """
    _check_every(every)
    try:
        from lightning.pytorch import Callback  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise _not_installed("lightning") from error

    class StoreCallback(Callback):
        """Loads at the start, saves every `every` steps."""

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            """Fill what Lightning has built; it restores a checkpoint of its own at this place."""
            schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
            named = {"optimizer": trainer.optimizers, "schedule": schedules}
            self.state = {"model": pl_module, "loops": OptionalObject(trainer.fit_loop)}
            self.state |= {f"{n}{i}": x for n, found in named.items() for i, x in enumerate(found)}
            self.state["rng"] = RNGState()
            self.store = Store(path, **options)
            self.saved = self.store.load(self.state)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *given: Any) -> None:
            # The same for all batches that are accumulated in one step, so `step > self.saved` saves it only once.
            step = trainer.global_step
            if step % every == 0 and step > (self.saved or 0):
                self.saved = step
                self.store.save(step, self.state, wait=False)

        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            self.store.close()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self.store.__exit__(type(exception), exception, None)

    return StoreCallback()


def _check_every(every: int) -> None:
    if type(every) is not int or every < 1:
        raise invalid("every", "range", every, "must be an integer of at least 1", "use 100")


def _not_installed(package: str) -> Any:
    return invalid("", "requires", ..., f"needs the package {package}", f"pip install {package}")
