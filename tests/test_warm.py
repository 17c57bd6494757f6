"""warm.py: ranks that torch's launcher starts are forked too, and are what they would be otherwise."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import warm

RANK = """
import os, sys, time
told = os.environ["RANK"], os.getppid(), os.getsid(0) == os.getpid(), "diffusers" in sys.modules
os.write(1, (" ".join(map(str, told)) + chr(10)).encode())  # in one piece: both write to one pipe
while os.environ["RANK"] == "1" and not os.path.exists("first"):  # else its end is the other's too
    time.sleep(0.02)
open("first", "w")
os._exit(3 * int(os.environ["RANK"]))  # at once: while one ends slowly, the other's failure ends it too
"""
LAUNCH = f"""
import os, sys
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
config = LaunchConfig(1, 1, 2, run_id="x", rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0)
try:
    elastic_launch(config, sys.executable)("-c", {RANK!r})
except ChildFailedError as error:
    for rank, failure in error.failures.items():
        print("failed", rank, os.getpid(), failure.exitcode)
"""


@pytest.mark.parametrize("ranks", [2, 0])
def test_ranks_are_forked_and_their_launcher_is_their_parent(ranks: int, tmp_path: Path) -> None:
    """The control is the launcher that starts interpreters, which have nothing imported."""
    settings = {"capture_output": True, "text": True, "check": True, "cwd": tmp_path}
    done = warm.run([sys.executable, "-c", LAUNCH], ranks=ranks, **settings)
    lines = [line.split() for line in done.stdout.splitlines()]
    [failed] = [line[1:] for line in lines if line[0] == "failed"]
    rank, launcher, code = failed
    assert (rank, code) == ("1", "3")
    told = sorted(line for line in lines if line[0] != "failed")
    assert told == [[str(i), launcher, "True", str(ranks == 2)] for i in range(2)]
