"""How `make nightly` shares its tests between processes: by module, the longest first.

A module's tests run in one process, so that what they share is made once. With `--dist loadgroup` and
`--no-loadscope-reorder` groups are started in the order of collection; the short ones at the end fill what is
left, so that no process waits long for the other.
"""

from __future__ import annotations

from pathlib import Path

import pytest

LONGEST = (
    "ray",
    "tests/e2e/test_docs_commands.py",
    "tests/measure/test_gpu_script.py",
    "tests/train/test_on_fake_card.py",
    "tests/serve/test_simulation.py",
    "tests/serve/engine/test_deterministic.py",
    "tests/sample/test_backends.py",
    "tests/models/test_compiling.py",
    "tests/fuzz/test_fuzz.py",
    "tests/train/test_parallel.py",
    "tests/sample/optimisations/test_table.py",
    "tests/e2e/test_base_install.py",
    "tests/sample/test_estimate.py",
    "tests/train/test_other_devices.py",
    "tests/data/test_purging.py",
    "tests/measure/test_serving.py",
    "tests/e2e/test_other_system.py",
    "tests/plan/test_recipe_header.py",
    "tests/e2e/test_emoji.py",
    "tests/sample/test_on_fake_cuda.py",
    "tests/serve/api/test_every_route.py",
    "tests/train/test_kill_matrix.py",
    "tests/train/test_fine_tuning_resume.py",
    "tests/e2e/test_readme.py",
    "tests/sample/test_watermark.py",
    "tests/plan/test_training_memory.py",
    "tests/sample/optimisations/test_vae.py",
    "tests/test_make.py",
    "tests/serve/engine/test_engine.py",
    "tests/train/test_resume.py",
    "tests/measure/test_finetuning.py",
)
"""Groups by their seconds (`python make.py nightly` prints them at its end); the others stay as collected."""


def is_chosen(config: pytest.Config) -> bool:
    return bool(config.option.markexpr == "nightly")


def may_hold(path: Path) -> bool:
    """Whether a file has such a test at all; the others need not be imported."""
    return not path.name.startswith("test_") or "nightly" in path.read_text(encoding="utf-8")


def group_of(item: pytest.Item) -> str:
    mark = item.get_closest_marker("xdist_group")
    return str(mark.args[0]) if mark else item.nodeid.partition("::")[0]


def arrange(items: list[pytest.Item]) -> None:
    """One group a module, and the longest first."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(group_of(item)))
    place = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(group_of(item), len(place)))


def seconds_by_group(reports: list[pytest.TestReport]) -> dict[str, float]:
    """Of each group all that its tests, their set-up and tear-down took; the longest first."""
    found: dict[str, float] = {}
    for report in reports:
        test, _, group = report.nodeid.rpartition("@")
        name = group if test and "]" not in group else report.nodeid.partition("::")[0]
        found[name] = found.get(name, 0.0) + report.duration
    return dict(sorted(found.items(), key=lambda entry: -entry[1]))
