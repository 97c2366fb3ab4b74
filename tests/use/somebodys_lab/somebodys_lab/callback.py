"""The losses of a run in a file of their own, kept in checkpoints."""

from typing import Any

from forge_train import Callback


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, trainer: Any, row: Any) -> None:
        self.losses.append(row["loss"])

    def on_end(self, trainer: Any) -> None:
        if trainer.meshes.rank == 0:
            (trainer.paths.path / "losses.txt").write_text("\n".join(map(str, self.losses)))

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])
