"""`transformers.Trainer` that stops on a signal with code 75, skips bad steps, is watched, and keeps a journal."""

from torch.nn.utils import get_total_norm
from transformers import TrainerCallback

from forge_resilience import Agreement, ExitCode, Journal, StopSignal, Vote, nonfinite
from forge_resilience.heartbeat import Heartbeat


class ForgeGuard(TrainerCallback):
    """`trainer.train(...)`, then `sys.exit(guard.exit_code)`: a scheduler, or the same command, goes on after 75."""

    def __init__(self, folder):
        self.journal, self.heartbeat = Journal(f"{folder}/events.jsonl"), Heartbeat.from_environ()
        self.stop, self.told = StopSignal(), None

    @property
    def exit_code(self):
        return ExitCode.REQUEUE if self.told else ExitCode.DONE

    def record(self, event, state, **fields):
        if state.is_world_process_zero:
            self.journal.record(event, step=state.global_step, **fields)

    def on_train_begin(self, args, state, control, **_):
        self.stop.__enter__()
        self.record("resume" if state.global_step else "start", state)

    def on_step_begin(self, args, state, control, **_):
        self.heartbeat.enter("step", state.global_step + 1)

    def on_pre_optimizer_step(self, args, state, control, model, **_):
        norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        if nonfinite(norm):  # the update finds no gradient: no weight and no moment moves
            model.zero_grad()
            self.record("skip", state, grad_norm=norm)

    def on_step_end(self, args, state, control, **_):
        self.told = Agreement().start(Vote(stop=self.stop.number)).wait().stop
        if self.told:
            control.should_save = control.should_training_stop = True
        self.heartbeat.enter("save" if control.should_save else "data")

    def on_prediction_step(self, args, state, control, **_):
        self.heartbeat.enter("evaluate")

    def on_save(self, args, state, control, **_):
        self.record("save", state)

    def on_train_end(self, args, state, control, **_):
        self.heartbeat.enter("exit")
        self.record("stop" if self.told else "done", state)
        self.stop.__exit__(None, None, None)
