"""What `deploy/` says fits what the server does."""

from __future__ import annotations

import re
from pathlib import Path

import typer.main
import yaml

from darkroom.cli.door import app
from darkroom.serve.api.app import OPEN_PATHS

DEPLOY = Path(__file__).parents[3] / "deploy"
CLOSING_S = 10


def test_the_grace_time_fits_the_drain_and_probes_need_no_key():
    deployment = next(iter(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())))
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    [drain] = [int(arg.split("=")[1]) for arg in container["args"] if arg.startswith("--drain=")]
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert pod["terminationGracePeriodSeconds"] >= pause + drain + CLOSING_S
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in OPEN_PATHS


def test_every_option_is_one_of_serve_s():
    known = {name for one in typer.main.get_command(app).commands["serve"].params for name in one.opts}
    deployment = next(iter(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())))
    given = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    [command] = re.findall(r"^CMD \[(.*)\]$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    options = re.findall(r"--[a-z-]+", " ".join([*given, command]))
    assert len(options) >= 9
    assert set(options) <= known
