"""Training in processes that can be killed: a server with everything imported forks one for each session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

SERVER = """
import json, os, sys, traceback
import darkroom
import torch
torch.set_num_threads(1)
import darkroom.train.run, darkroom.recipe.recipe, darkroom.sample, darkroom.prepare
import diffusers.models.autoencoders.autoencoder_kl, diffusers.models.unets.unet_2d_condition
import lance, transformers.models.clip.modeling_clip, transformers.models.clip.tokenization_clip
print("ready", flush=True)
for line in sys.stdin:
    told = json.loads(line)
    child = os.fork()
    if child:
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(status, flush=True)
        continue
    code = 0
    try:
        os.dup2(os.open(told["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
        os.dup2(1, 2)
        recipe = darkroom.recipe.recipe.make_recipe(told["recipe"])
        darkroom.train.run.train(recipe, out=told["out"], resume=told.get("resume", "auto"))
    except darkroom.errors.DarkroomError as error:
        print(type(error).__name__, error, flush=True)
        code = error.exit_code
    except BaseException:
        traceback.print_exc()
        code = 3
    os._exit(code)
"""


class TrainingServer:
    """Starts sessions of a run as processes of their own, without the seconds that importing takes."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self._line() == "ready"
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def start(self, recipe: dict[str, Any], out: Path, **more: Any) -> int:
        """Start a session; returns its process id. Its output goes to `<out>.log`."""
        told = {"recipe": recipe, "out": str(out), "log": f"{out}.log", **more}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(told) + "\n")
        self._process.stdin.flush()
        return int(self._line())

    def wait(self) -> int:
        """Wait for the session to end; returns what subprocess would call its return code."""
        return os.waitstatus_to_exitcode(int(self._line()))
