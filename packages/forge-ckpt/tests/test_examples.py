"""The examples for strangers do what they say: jobs of other projects go on, bit for bit."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch

from forge_ckpt import Store, lightning_callback, read_tensors, transformers_callback
from forge_testing import run_on_ranks
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

EXAMPLES = Path(__file__).parents[1] / "examples"


def _example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- FSDP2


def _start(world, root, group, script=EXAMPLES / "fsdp2_job.py"):
    """The ranks of the job, as a launcher would start them."""
    command = [sys.executable, "-W", "ignore", str(script), str(root)]
    common = {**os.environ, "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(group), "GLOO_SOCKET_IFNAME": "lo"}
    return [
        subprocess.Popen(command, env={**common, "RANK": str(rank)}, stderr=subprocess.PIPE)
        for rank in range(world)
    ]


def _ends(ranks):
    texts = [rank.communicate(timeout=120)[1] for rank in ranks]
    return [rank.returncode for rank in ranks], texts


def _free_port():
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_an_fsdp2_job_that_was_killed_goes_on_with_the_same_bits(tmp_path, world):
    codes, texts = _ends(_start(2, tmp_path / "whole", _free_port()))
    assert codes == [0, 0], texts
    ranks = _start(2, tmp_path / "killed", _free_port())
    deadline = time.monotonic() + 120
    while not (tmp_path / "killed/step-00000004").exists():
        assert time.monotonic() < deadline
        assert all(rank.poll() is None for rank in ranks)
        time.sleep(0.005)  # polling a directory
    ranks[1].send_signal(signal.SIGKILL)
    codes, _ = _ends(ranks)
    assert codes[1] == -signal.SIGKILL
    assert codes[0] != 0, "the other rank cannot go on alone"
    with Store(tmp_path / "killed", read_only=True) as store:
        assert 4 <= store.steps()[-1] < 12
    codes, texts = _ends(_start(world, tmp_path / "killed", _free_port()))
    assert codes == [0] * world, texts
    found, wanted = (dict(read_tensors(tmp_path / name)) for name in ("killed", "whole"))
    assert len(wanted) == 4 + 4 * 3, "weights and AdamW's slots"
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    with Store(tmp_path / "killed", read_only=True) as store:
        assert store.steps()[-1] == 12


_COUNTS_THREADS = """
import atexit, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from forge_ckpt import Store

def gloo():  # threads that have begun: they name themselves
    def name(task):
        try:
            return (task / "comm").read_text()
        except OSError:
            return ""  # it has just ended
    return {task.name for task in Path("/proc/self/task").iterdir() if "gloo" in name(task)}

def at_the_end():  # the last to run
    until = time.monotonic() + 10  # the kernel lists a joined thread a moment longer
    while saving & gloo() and time.monotonic() < until:
        time.sleep(0.01)
    print(len(saving), len(saving & gloo()), file=sys.stderr)

atexit.register(at_the_end)
dist.init_process_group("gloo")
before = {task.name for task in Path("/proc/self/task").iterdir()}
store = Store(sys.argv[1])
store.save(1, {"x": torch.ones(2)}, wait=False)
store.wait()  # threads of its group have sent and received
saving = gloo() - before
store.close()
dist.destroy_process_group()
"""


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="names of threads stand in /proc")
def test_no_thread_of_a_closed_store_is_there_when_python_ends(tmp_path):
    """A thread of gloo that frees a tensor while Python ends aborts a job that has done all its work."""
    script = tmp_path / "job.py"
    script.write_text(_COUNTS_THREADS)
    codes, texts = _ends(_start(2, tmp_path / "saved", _free_port(), script))
    assert codes == [0, 0], texts
    for text in texts:
        saving, end = map(int, text.split()[-2:])
        assert saving > 0
        assert end == 0


# ---- transformers.Trainer


class Stream(torch.utils.data.IterableDataset):
    """Rows that are a function of their number."""

    start = 0

    def seek(self, row):
        self.start = row

    def __iter__(self):
        row = self.start
        while True:
            ids = torch.randint(0, 32, (12,), generator=torch.Generator().manual_seed(row))
            yield {"input_ids": ids, "labels": ids}
            row += 1


class Interrupted(Exception):
    pass


def _trainer(folder, steps, stop_at=None):
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == stop_at:
                raise Interrupted

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 32}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    data = Stream()
    arguments = TrainingArguments(
        folder / "hf",
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        learning_rate=1e-2,
        use_cpu=True,
    )
    checkpoints = transformers_callback(folder / "forge", 2, data.seek)
    return Trainer(model, arguments, train_dataset=data, callbacks=[checkpoints, Stop()])


@pytest.mark.slow
def test_a_trainer_of_transformers_goes_on_with_the_same_bits(tmp_path):
    for name in ("transformers", "accelerate"):
        pytest.importorskip(name)
    whole = _trainer(tmp_path / "whole", 8)
    whole.train()
    stopped = _trainer(tmp_path / "stopped", 8, stop_at=5)
    with pytest.raises(Interrupted):
        stopped.train()
    for callback in stopped.callback_handler.callbacks:
        if hasattr(callback, "store"):
            callback.store.close()  # as the end of the process would
    resumed = _trainer(tmp_path / "stopped", 8)
    assert resumed.train().global_step == 8
    wanted = whole.model.state_dict()
    found = resumed.model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    first = _trainer(tmp_path / "other", 8).model.state_dict()
    assert not any(torch.equal(found[n], v) for n, v in first.items() if v.dim() > 1)
    rates = [t.lr_scheduler.state_dict()["last_epoch"] for t in (whole, resumed)]
    assert rates == [8, 8]
    with Store(tmp_path / "stopped/forge", read_only=True) as store:
        assert store.steps() == [4, 6, 8]


# ---- lightning


class Counter:
    """Progress of the loops, as that of Lightning: a state of plain values."""

    def __init__(self):
        self.steps = 0

    def state_dict(self):
        return {"epoch_loop.state_dict": {"steps": self.steps}, "empty": {}}

    def load_state_dict(self, state):
        self.steps = state["epoch_loop.state_dict"]["steps"]


class StandIn:
    """A trainer that calls the hooks in the order of Lightning 2: strategy, on_fit_start, batches, on_fit_end."""

    def __init__(self, callback, max_steps):
        self.callback, self.max_steps = callback, max_steps
        self.fit_loop = Counter()

    global_step = property(lambda self: self.fit_loop.steps)

    def fit(self, module):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        self.optimizers = [optimizer]
        self.lr_scheduler_configs = [types.SimpleNamespace(scheduler=schedule)]
        self.callback.on_fit_start(self, module)
        try:
            while self.global_step < self.max_steps:
                for batch_idx in range(2):  # two batches a step
                    if batch_idx:
                        module(torch.rand(4, 3)).square().mean().backward()
                        optimizer.step()
                        optimizer.zero_grad()
                        schedule.step()
                        self.fit_loop.steps += 1
                    self.callback.on_train_batch_end(self, module, None, None, batch_idx)
        except BaseException as error:
            self.callback.on_exception(self, module, error)
            raise
        self.callback.on_fit_end(self, module)


def test_a_trainer_like_lightnings_goes_on_with_the_same_bits(tmp_path, monkeypatch):
    if importlib.util.find_spec("lightning") is None:
        modules = {name: types.ModuleType(name) for name in ("lightning", "lightning.pytorch")}
        modules["lightning.pytorch"].Callback = object
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)

    def fit(folder, steps):
        torch.manual_seed(0)
        trainer = StandIn(lightning_callback(tmp_path / folder, 2, keep_last=9), steps)
        trainer.fit(module := torch.nn.Linear(3, 3))
        return trainer, module.state_dict()

    _, wanted = fit("whole", 6)
    fit("stopped", 4)
    resumed, found = fit("stopped", 6)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert resumed.lr_scheduler_configs[0].scheduler.last_epoch == 6
    with Store(tmp_path / "stopped", read_only=True) as store:
        assert store.steps() == [2, 4, 6]
    with rejects("every", 0, "range"):
        lightning_callback(tmp_path, 0)


@pytest.mark.slow
def test_a_trainer_of_lightning_goes_on_with_the_same_bits(tmp_path):
    """With the library itself, in the environment that has it."""
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 3)

        def training_step(self, batch, index):
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def fit(folder, steps):
        torch.manual_seed(0)
        module, rows = Module(), torch.rand(4, 3).repeat(40, 1)  # equal batches
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        callback = lightning_callback(tmp_path / folder, 2, keep_last=9)
        trainer = lightning.Trainer(
            max_steps=steps, accelerator="cpu", callbacks=[callback],
            enable_checkpointing=False, default_root_dir=tmp_path, **quiet,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(rows, 4))
        return trainer, module.state_dict()

    _, wanted = fit("whole", 6)
    fit("stopped", 4)
    resumed, found = fit("stopped", 6)
    assert resumed.global_step == 6
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    with Store(tmp_path / "stopped", read_only=True) as store:
        assert store.steps() == [2, 4, 6]


def test_a_callback_names_the_package_that_is_missing(tmp_path, monkeypatch):
    for callback in (lightning_callback, transformers_callback):
        name = callback.__name__.partition("_")[0]
        monkeypatch.setitem(sys.modules, name, None)
        with rejects("", ..., "requires") as caught:
            callback(tmp_path)
        assert caught.value.problems[0].fix == f"pip install {name}"


# ---- torchdata


def _read(path, steps, workers):
    return _example("stateful_loader").read(path, steps, workers=workers)


@pytest.mark.distributed
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_torchdatas_loader_goes_on_in_the_middle_of_an_epoch(tmp_path, workers):
    pytest.importorskip("torchdata")
    parts = [run_on_ranks(2, _read, str(tmp_path / "s"), steps, workers) for steps in (5, 7, 12)]
    whole = run_on_ranks(2, _read, str(tmp_path / "whole"), 24, workers)
    for rank in range(2):
        assert [batch for part in parts for batch in part[rank]] == whole[rank]
    read = [row for rank in whole for batch in rank for row in batch]
    assert sorted(read) == list(range(96)), "each row once"
