"""The workflow for public CI: both commands, on every system that the installation page names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FILE = ROOT / ".github" / "workflows" / "test.yml"


def commands(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def test_both_commands_run_on_every_system() -> None:
    told = yaml.safe_load(FILE.read_text("utf-8"))
    assert told["permissions"] == {"contents": "read"}
    for name, job in told["jobs"].items():
        assert f"python make.py {name}" in commands(job)
        systems = job["strategy"]["matrix"]["system"]
        assert {system.partition("-")[0] for system in systems} == {"ubuntu", "macos", "windows"}
        assert any(system.endswith("-arm") for system in systems)
        assert job["runs-on"] == "${{ matrix.system }}"
    assert set(told["jobs"]) == {"quickstart", "test"}
    pythons = told["jobs"]["quickstart"]["strategy"]["matrix"]["python"]
    page = (ROOT / "docs" / "installation.md").read_text("utf-8")
    assert f"{pythons[0]} to {pythons[-1]}" in page
    assert FILE.read_text("utf-8").splitlines()[0].startswith("# Both commands on every system. Not yet run:")
