"""A second request to stop leaves at once, whatever is being written, and what was saved before is whole."""

from __future__ import annotations

import _thread
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import yaml

import warm
from darkroom.errors import Stopped
from darkroom.train import checkpoint
from darkroom.train.checkpoint import checkpoints, load_checkpoint
from darkroom.train.run import train

STUCK = """
import sys, time
from darkroom.cli import main
from darkroom.train import checkpoint
write = checkpoint._write_hashed
def write_until_the_second(file, chunks):
    if checkpoint.checkpoints(file.parent.parent):
        print("writing", flush=True)
        time.sleep(600)
    return write(file, chunks)
checkpoint._write_hashed = write_until_the_second
main(sys.argv[1:])
"""


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_waits_for_no_checkpoint(recipe_of, tmp_path: Path, second: int) -> None:
    out, file = tmp_path / "run", tmp_path / "recipe.yaml"
    recipe = recipe_of("autoencoder", "train.steps=1000")
    file.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    command = [sys.executable, "-c", STUCK, "train", str(file), "--out", str(out)]
    with warm.Popen(command, stdout=warm.PIPE, stderr=warm.PIPE, text=True) as job:
        assert job.stdout is not None
        while "writing" not in (line := job.stdout.readline()):
            assert line
        job.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            job.wait(1)  # the first one waits for what is being saved
        job.send_signal(second)
        said = job.communicate(timeout=60)[1]
    assert job.returncode == 1
    left = (
        r"darkroom: stopped at once after step \d+; the checkpoint of step 2 is kept, and the same command "
    )
    assert re.fullmatch(left + "goes on", said.strip().splitlines()[-1]), said
    assert "Traceback" not in said
    assert [load_checkpoint(path).step for path in checkpoints(out / "checkpoints")] == [2]
    messages: list[str] = []
    shorter = recipe_of("autoencoder", "train.steps=6")
    assert train(shorter, out=out, console=messages.append).steps == 6
    assert "going on after step 2 of 6" in messages


BARE = """
import os, signal, sys, time
if "RANK" in os.environ:
    def leave(*_):
        os.write(2, b"rank 0 left\\n")
        os._exit(1)
    def note(*_):  # as ranks do: the first is noted, the second leaves
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, leave)
        os.write(1, b"saving\\n")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note if os.environ["RANK"] == "0" else signal.SIG_IGN)
    os.write(1, b"started\\n")
    time.sleep(600)
"""
"""What ranks do of signals, before anything is imported: rank 1 hangs, where no signal reaches Python."""
LAUNCH = """
import os, sys
os.environ["PYTHONPATH"] = os.pathsep.join([sys.argv[1], *filter(None, [os.environ.get("PYTHONPATH")])])
from darkroom.cli import main
main(sys.argv[2:])
"""
TWO_RANKS = ("train.steps=100000", "train.micro_batch=2", "parallel.mode=ddp", "parallel.devices=2")


@contextmanager
def launched(recipe, tmp_path: Path, in_ranks: str) -> Iterator[tuple[warm.Popen, Callable[[str], None]]]:
    """A job of two ranks that run this first, and a call that waits until they say a word."""
    file, site = tmp_path / "recipe.yaml", tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(in_ranks)
    file.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    command = [sys.executable, "-c", LAUNCH, str(site), "train", str(file), "--out", str(tmp_path / "run")]
    with warm.Popen(command, stdout=warm.PIPE, stderr=warm.PIPE, text=True) as job:
        assert job.stdout is not None
        lines = job.stdout

        def wait_for(word: str) -> None:
            while word not in (line := lines.readline()):
                assert line, word

        yield job, wait_for


def ended(job: warm.Popen, ranks: list[psutil.Process]) -> str:
    """What a job says that must end soon, with all its processes."""
    try:
        said = job.communicate(timeout=60)[1]
        alive = psutil.wait_procs(ranks, timeout=10)[1]
    finally:
        for process in (p for p in ranks if p.is_running()):
            process.kill()
    assert alive == []
    assert job.returncode == 1
    return said.strip()


def test_a_second_ctrl_c_waits_for_no_rank_that_hangs(recipe_of, tmp_path: Path) -> None:
    with launched(recipe_of("autoencoder", *TWO_RANKS), tmp_path, BARE) as (job, wait_for):
        for _ in range(2):
            wait_for("started")
        ranks = psutil.Process(job.pid).children()
        assert len(ranks) == 2
        job.send_signal(signal.SIGINT)
        wait_for("saving")
        assert [rank.is_running() for rank in ranks] == [True, True]  # the first one waits
        job.send_signal(signal.SIGINT)
        lines = ended(job, ranks).splitlines()
    assert lines == [
        "rank 0 left",
        "darkroom: 1 of the job's processes did not stop and were killed; what was saved before is whole, "
        "and the same command goes on",
    ]


@pytest.mark.nightly
def test_a_second_ctrl_c_ends_a_job_of_two_that_saves(recipe_of, tmp_path: Path) -> None:
    held = STUCK[: STUCK.index("main(")].replace("from darkroom.cli import main\n", "")
    in_ranks = f"import os\nif 'RANK' in os.environ:\n    exec({held!r})\n"
    with launched(recipe_of("autoencoder", *TWO_RANKS), tmp_path, in_ranks) as (job, wait_for):
        wait_for("writing")
        ranks = psutil.Process(job.pid).children()
        job.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            job.wait(1)
        job.send_signal(signal.SIGINT)
        said = ended(job, ranks)
    left = (
        r"darkroom: stopped at once after step \d+; the checkpoint of step 2 is kept, and the same command "
    )
    assert re.fullmatch(left + "goes on", said), said
    assert [load_checkpoint(path).step for path in checkpoints(tmp_path / "run" / "checkpoints")] == [2]


def test_where_darkroom_is_a_library_the_second_is_pythons(recipe_of, tmp_path: Path, monkeypatch) -> None:
    """The first saves; the second interrupts, and nothing that is being written is waited for."""
    write, held, writing = checkpoint._write_hashed, threading.Event(), threading.Event()

    def stuck(file, chunks):  # the first file of the second checkpoint
        if checkpoints(file.parent.parent) and not writing.is_set():
            writing.set()
            held.wait(20)
        return write(file, chunks)

    def interrupt(message: str) -> None:
        """Both, while it is written, and not within a join: one that is interrupted has Python 3.12 and
        earlier take a thread for ended. No real signals: Python takes those on the thread's alternate stack,
        and where a library of an earlier test had unmapped that, the system ends the process (-11).
        """
        if re.match(r"step +6/", message):
            assert writing.wait(60)
            for _ in range(2):
                _thread.interrupt_main(signal.SIGINT)

    monkeypatch.setattr(checkpoint, "_write_hashed", stuck)
    recipe = recipe_of("autoencoder", "train.steps=1000")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests
    try:
        with pytest.raises((KeyboardInterrupt, Stopped)) as raised:
            train(recipe, out=tmp_path / "run", console=interrupt)
        assert raised.type is KeyboardInterrupt
        assert writing.is_set()
        # Waited for, it would be written, and be the second one.
        assert [path.name for path in checkpoints(tmp_path / "run" / "checkpoints")] == ["step-00000002"]
    finally:
        signal.signal(signal.SIGINT, before)
        held.set()
        for thread in threading.enumerate():
            if thread.name == "save":
                thread.join(60)
