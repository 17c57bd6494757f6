"""A second request to stop leaves at once, whatever is being written, and what was saved before is whole."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

import warm
from darkroom.errors import Stopped
from darkroom.train.checkpoint import format as checkpoint
from darkroom.train.checkpoint.format import checkpoints, load_checkpoint
from darkroom.train.run import train

STUCK = """
import sys, time
from darkroom.cli import main
from darkroom.train.checkpoint import format
write = format._write_hashed
def write_until_the_second(file, chunks):
    if format.checkpoints(file.parent.parent):
        print("writing", flush=True)
        time.sleep(600)
    return write(file, chunks)
format._write_hashed = write_until_the_second
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


def test_where_darkroom_is_a_library_the_second_is_pythons(recipe_of, tmp_path: Path, monkeypatch) -> None:
    """The first saves; the second interrupts, and nothing that is being written is waited for."""
    write, held = checkpoint._write_hashed, threading.Event()

    def stuck(file, chunks):  # from the second checkpoint on
        if checkpoints(file.parent.parent) and not held.is_set():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)  # two at once would be one
            os.kill(os.getpid(), signal.SIGINT)
            held.wait(60)
        return write(file, chunks)

    monkeypatch.setattr(checkpoint, "_write_hashed", stuck)
    recipe = recipe_of("autoencoder", "train.steps=1000")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests
    try:
        with pytest.raises((KeyboardInterrupt, Stopped)) as raised:
            train(recipe, out=tmp_path / "run", console=lambda _: None)
        assert raised.type is KeyboardInterrupt
        assert not held.is_set()
        assert [path.name for path in checkpoints(tmp_path / "run" / "checkpoints")] == ["step-00000002"]
    finally:
        signal.signal(signal.SIGINT, before)
        held.set()
        for thread in threading.enumerate():
            if thread.name == "save":
                thread.join(60)
