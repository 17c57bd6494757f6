"""Every command of README.md and docs/ is parsed as printed; those of the README run, in their order, on what
those before them left, heavy parts at toy size: here, and once more as on a processor with AVX2 alone.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from PIL import Image

import warm
from darkroom import cli
from darkroom.errors import InputError
from darkroom.quickstart.shapes import draw, scenes
from documented import Command, check_values, commands, parsed

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = commands(ROOT / "README.md")

SHORT = [
    "train.steps=2",
    "optim.warmup_steps=0",
    "train.global_batch=4",
    "data.holdout=2",
    "evaluate.every=2",
    "sample.every=2",
]
# OpenVINO 2026.4 crashes in layers of 8 channels where ONEDNN_MAX_CPU_ISA hides AVX-512 that is there.
SMALL = ["model.unet.block_out_channels=[16,32]", "model.unet.norm_num_groups=8", "sample.steps=1"]
TOY = {
    "train recipes/autoencoder.yaml": [
        *SHORT,
        "model.vae={block_out_channels: [16, 16, 16], norm_num_groups: 8, latent_channels: 4}",
    ],
    "train recipes/pretrain.yaml": [*SHORT, *SMALL, "model.vocab_size=600"],
    "train recipes/sd15-dreambooth-lora.yaml": [
        *("model.base=runs/first/model", "train.steps=2", "sample.every=2", "sample.steps=1"),
        *("data.resolution=64", "checkpoint.every=1"),
    ],
    "generate": ["--steps", "2", "--guidance", "2"],
    "bench loader": ["--rows", "512", "--repeats", "5"],
}
"""What is added to a command, by how it begins, so that it takes seconds."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with what the README's reader has: pictures, a model of their own, adapters' folder."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    for i, scene in enumerate(scenes(16)):
        to = folder / ("photos" if i < 12 else "old-photos")
        to.mkdir(exist_ok=True)
        draw(scene, 96).save(to / f"{i}.png")
        (to / f"{i}.txt").write_text(scene.triple.caption)
    Image.new("RGB", (64, 64), "teal").save(folder / "photo.jpg")
    Image.new("L", (64, 64), 255).save(folder / "hat.png")
    (folder / "loras").mkdir()
    before = Path.cwd()
    os.chdir(folder)
    run("import", "old-photos", "pictures.lance")
    yield folder
    os.chdir(before)


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(list(arguments))
    assert not left.value.code, shlex.join(arguments)


def toy(arguments: list[str]) -> list[str]:
    """A command of the README with what makes it short."""
    said = shlex.join(arguments)
    more = next((added for start, added in TOY.items() if said.startswith(start)), [])
    if "--backend" in arguments:
        more = [*more, "--size", "64x64"]
    return [*arguments, *more]


def serve(arguments: list[str]) -> None:
    """Start the server as the README says, on a free port, until it is ready; then tell it to stop."""
    arguments[arguments.index("--port") + 1] = "0"
    command = [sys.executable, "-m", "darkroom", *arguments, "--state", "state"]
    with warm.Popen(command, stdout=warm.PIPE, stderr=warm.STDOUT, text=True) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        url = next(found[0] for line in lines if (found := re.findall(r"http://[\d.:]+", line)))
        with urllib.request.urlopen(f"{url}/live", timeout=30) as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0


@pytest.mark.parametrize("command", commands(), ids=lambda command: f"{command.page}: {command.text[:60]}")
def test_every_command_of_readme_and_docs_is_one(command: Command) -> None:
    """Its verb and options exist, and its values are allowed; nothing is run."""
    check_values(parsed(command.arguments))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("darkroom generate MODEL 'a dog' --sed 1", "No such option: --sed"),
        ("darkroom develop", "No such command"),
        ("darkroom generate MODEL 'a dog' --num none", "valid integer"),
        ("darkroom generate MODEL 'a dog' --size tall", "one number for a square"),
        ("darkroom generate MODEL 'a dog' --backend tensorrt", "backend 'tensorrt'"),
        ("darkroom train recipes/none.yaml", "no recipe"),
    ],
)
def test_a_command_that_is_none_is_found_out(text: str, told: str) -> None:
    with pytest.raises((InputError, typer.TyperException)) as caught:
        check_values(parsed(Command("here", text).arguments))
    error = caught.value
    assert told in (error.format_message() if hasattr(error, "format_message") else str(error))


def test_the_pages_have_commands() -> None:
    found = commands()
    assert len(found) >= 60
    assert len({command.page for command in found}) >= 9
    assert any("\\" not in command.text and "--adapter ink" in command.text for command in found)  # two lines


@pytest.mark.nightly
def test_every_command_of_the_readme_runs_with_avx2_alone() -> None:
    """In a process of its own: the limits are read when torch and OpenVINO are first used."""
    limits = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    here = f"{__file__}::test_every_command_of_the_readme_runs"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", here]
    done = subprocess.run(command, env={**os.environ, **limits}, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "1 passed" in done.stdout


@pytest.mark.nightly
def test_every_command_of_the_readme_runs(place: Path) -> None:
    assert len(COMMANDS) >= 20
    for command in COMMANDS:
        arguments = [part.replace("MODEL", "runs/first/model") for part in command.arguments]
        if arguments[0] == "evaluate":
            run("train", "recipes/extractor.yaml", *SHORT[:4], "--out", "runs/extractor")
        if "sd15.safetensors" in arguments:
            run("export", "runs/first/model", "--single-file", "--to", "sd15.safetensors")
        if arguments[0] == "serve":
            serve(arguments)
        elif "--memory" in arguments:  # of a process of its own: this one holds what all the others left
            subprocess.run([sys.executable, "-m", "darkroom", *toy(arguments)], check=True)
        else:
            run(*toy(arguments))
