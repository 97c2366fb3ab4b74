"""The losses of a run in a file of their own, kept in checkpoints."""

from typing import Any

from forge_train import Callback


class Losses(Callback):
    def __init__(self, file: str = "losses.txt") -> None:
        self.file = file
        self.losses: list[float] = []
        self.steps: list[int] = []

    def on_log(self, trainer: Any, row: Any) -> None:
        self.losses.append(row["loss"])

    def on_step_end(self, trainer: Any) -> None:
        self.steps.append(trainer.progress.step)

    def on_end(self, trainer: Any) -> None:
        if trainer.meshes.rank == 0:
            (trainer.paths.path / self.file).write_text("\n".join(map(str, self.losses)))
            (trainer.paths.path / f"steps-{self.file}").write_text(str(self.steps))

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses, self.steps = list(state["losses"]), list(state["steps"])
