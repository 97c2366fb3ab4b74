"""Supervised torch programs: a collective that never ends, an abort from C++, torchrun inside."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forge_resilience import read_events

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

# Plain data parallelism as anybody writes it, with a checkpoint of rank 0 after each step.
_TRAIN = """
import hashlib, os, sys
from pathlib import Path
import torch, torch.distributed as dist
from forge_resilience.heartbeat import Heartbeat
heartbeat = Heartbeat.from_environ()
here, rank, life = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ.get("FORGE_LIFE", 0))
torch.set_num_threads(1)
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group("gloo")
weights, first = torch.zeros(8), 1
heartbeat.enter("load")
if (here / "checkpoint").exists():
    first, weights = torch.load(here / "checkpoint", weights_only=True)
for step in range(first, 9):
    heartbeat.enter("data", step)
    gradient = torch.randn(8, generator=torch.Generator().manual_seed(100 * step + rank))
    heartbeat.enter("step")
    if (life, step, rank) == (0, 5, 1):
        SPOIL
    dist.all_reduce(gradient)
    weights = 0.9 * weights - gradient
    if rank == 0:
        torch.save((step + 1, weights), here / "new")
        os.replace(here / "new", here / "checkpoint")
    dist.barrier()
heartbeat.enter("exit")
(here / f"end{rank}").write_text(hashlib.sha256(weights.numpy(force=True).tobytes()).hexdigest())
os._exit(0)
"""


def train(
    folder: Path, spoil: str, *flags: str, inner: tuple[str, ...] = ()
) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    script = folder / "train.py"
    text = _TRAIN.replace("weights.numpy(force=True).tobytes()", "repr(weights.tolist()).encode()")
    script.write_text(text.replace("SPOIL", spoil))
    return subprocess.Popen(
        [sys.executable, "-m", "forge_resilience.supervise", *flags, f"--journal={folder}/events.jsonl",
         f"--heartbeats={folder}/beats", "--", *(inner or (sys.executable,)), str(script), str(folder)],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def ends(folder: Path) -> list[str]:
    return [(folder / f"end{rank}").read_text() for rank in range(2)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("undisturbed")
    process = train(folder, "pass", "--nproc=2")
    said = process.communicate(timeout=900)[1]
    assert process.returncode == 0, said
    assert not (folder / "events.jsonl").exists()
    return ends(folder)


SPOILS = {
    "F66 skipped collective": ("dist.barrier = lambda: None", "hang"),
    # F67: gloo ends the process from C++, where no Python of the rank can act
    "F67 shape mismatch": ("gradient = gradient[:3]", "restart"),
}


@pytest.mark.parametrize("kind", SPOILS)
def test_F67_F66_a_broken_collective_ends_and_the_run_goes_on_bit_by_bit(
    tmp_path, undisturbed, kind
):
    spoil, first = SPOILS[kind]
    limits = ("--step_seconds=4", "--first_step_seconds=60", "--limits=exit=4")
    process = train(tmp_path, spoil, "--nproc=2", *limits)
    said = process.communicate(timeout=900)[1]
    assert process.returncode == 0, said
    events = list(read_events(tmp_path / "events.jsonl"))
    assert events[0]["event"] == first, said
    assert [e["event"] for e in events].count("restart") == 1
    if first == "hang":
        assert events[0]["step"] == 5
        assert 4 < events[0]["seconds"] <= 9
        assert (events[0]["rank"], events[0]["phase"]) == (0, "step")
        assert re.search(
            r"rank 0 is late: phase step, step 5, \d entr.*, waits in barrier",
            said,
        ), said
    else:
        assert events[0]["step"] == 5
        assert re.search(r"rank \d died by SIGABRT|rank \d .* code 1", events[0]["cause"])
    assert ends(tmp_path) == undisturbed


def test_F63_torchrun_hit_by_USR1_leaves_no_orphan(tmp_path):
    """Alone it dies of the signal and leaves its workers behind."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone")
    spoil = "pass\n    if step == 5: import time; (here / f'up{rank}').write_text(str(os.getpid())); time.sleep(600)"
    process = train(tmp_path, spoil, "--start_seconds=240", inner=torchrun)
    deadline = time.monotonic() + 240
    while not all((tmp_path / f"up{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    pids = [int((tmp_path / f"up{rank}").read_text()) for rank in range(2)]
    process.send_signal(signal.SIGUSR1)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 75, said  # a stop was asked for: the job is to come again
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not (tmp_path / "events.jsonl").exists()  # and it was not started again


def test_ranks_of_a_torchrun_are_watched_and_started_again_with_it(tmp_path, undisturbed):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone")
    spoil = "os.kill(os.getpid(), 19)"
    process = train(tmp_path, spoil, "--step_seconds=4", "--first_step_seconds=60", inner=torchrun)
    said = process.communicate(timeout=900)[1]
    assert process.returncode == 0, said
    (hang, restart) = read_events(tmp_path / "events.jsonl")
    assert (hang["event"], hang["rank"], hang["step"]) == ("hang", 1, 5)
    assert restart["event"] == "restart"
    assert ends(tmp_path) == undisturbed
