"""What the words of a request mean, and that wrong ones are told before anything heavy is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from darkroom import options
from darkroom.errors import InputError
from darkroom.hardware import system


def test_one_number_is_a_square():
    assert options.parse_size("256") == (256, 256)
    assert options.parse_size(" 512X768 ") == (512, 768)
    for wrong in ("big", "512x", "x512", "-8", "1x2x3", "512 512"):
        with pytest.raises(InputError, match="one number for a square"):
            options.parse_size(wrong)


@pytest.mark.parametrize(
    ("name", "solver", "sigmas"),
    [
        ("DPM++ 2M Karras", "dpmpp_2m", "karras"),
        ("dpm++ 2m  sde karras", "dpmpp_2m_sde", "karras"),
        ("DPM++ 2M SDE Exponential", "dpmpp_2m_sde", "exponential"),
        ("Euler a Align Your Steps", "euler_a", "align_your_steps"),
        ("Euler a", "euler_a", None),
        ("k_euler", "euler", None),
        ("dpmpp_2m", "dpmpp_2m", None),
        ("flow_heun", "flow_heun", None),
    ],
)
def test_a_solver_has_darkrooms_name_or_a1111s(name, solver, sigmas):
    assert options.parse_solver(name) == (solver, sigmas)


@pytest.mark.parametrize("name", ["DDIM Karras", "Karras", " Exponential", "Restart Karras", "LCM Beta"])
def test_a_schedule_in_the_name_of_what_takes_none_is_no_solver(name):
    assert options.find_solver(name) is None


def test_the_names_are_those_of_the_solvers_that_there_are():
    from darkroom.sample.choice import FILL
    from darkroom.sample.generate import GenerateSettings

    assert set(FILL) == {*options.SOLVER_NAMES, *options.FLOW_SOLVER_NAMES}
    asked = GenerateSettings.of(solver="DPM++ 2M Karras")
    assert (asked.solver, asked.karras) == ("dpmpp_2m", True)
    assert GenerateSettings.of(solver="DPM++ 2M", karras=False).karras is False
    asked = GenerateSettings.of(solver="DPM++ 3M SDE Exponential", sigmas="exponential")
    assert (asked.solver, asked.karras, asked.sigmas) == ("dpmpp_3m_sde", None, "exponential")
    with pytest.raises(InputError, match="3M SDE Exponential' with beta sigmas; say dpmpp_3m_sde"):
        GenerateSettings.of(solver="DPM++ 3M SDE Exponential", sigmas="beta")
    with pytest.raises(InputError, match="without Karras"):
        GenerateSettings.of(solver="DPM++ 2M Karras", karras=False)
    with pytest.raises(InputError, match="DPM\\+\\+ 2M Karras"):
        GenerateSettings.of(solver="eular")


@pytest.mark.parametrize("has_bf16", [True, False])
@pytest.mark.parametrize("backend", options.BACKENDS)
@pytest.mark.parametrize("precision", options.PRECISIONS)
def test_each_pair_on_a_cpu_works_or_is_refused(backend, precision, has_bf16, monkeypatch):
    """What passes here is computed by `tests/sample/test_backends.py`."""
    monkeypatch.setattr(system, "instructions", lambda: ("avx2", "avx512_bf16") if has_bf16 else ("avx2",))
    refused = precision == "fp16" or (backend == "openvino" and precision == "bf16" and not has_bf16)
    if not refused:
        return options.check_pair(backend, precision, "cpu")
    with pytest.raises(InputError, match=f"{precision}.*allowed: float32"):
        options.check_pair(backend, precision, "cpu")
    return None


def test_auto_is_a_precision_that_every_backend_takes(monkeypatch):
    for have, wanted in ((("avx2",), "float32"), (("avx2", "amx_bf16"), "bf16")):
        monkeypatch.setattr(system, "instructions", lambda have=have: have)
        name, why = options.cpu_precision()
        assert name == wanted
        assert ("amx_bf16" in why) == (name == "bf16")
        options.check_pair("openvino", name, "cpu")


WRONG = {
    "--solver eular": "solver 'eular'",
    "--size 9000": "allowed: sides of 8 to 8192",
    "--size tall": "WIDTHxHEIGHT",
    "--precision fp8": "precision 'fp8'",
    "--backend tensorrt": "backend 'tensorrt'",
    "--memory much": "memory 'much'",
}
SCRIPT = """
import io, json, sys, contextlib
from darkroom import cli
found = {}
for line in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            cli.main(["generate", "sd15", "a dog", *line.split()])
        except SystemExit as left:
            found[line] = [left.code, said.getvalue(), "torch" in sys.modules]
print(json.dumps(found))
"""


def test_wrong_words_are_told_in_one_line_before_torch_is_imported():
    command = [sys.executable, "-c", SCRIPT, json.dumps(list(WRONG))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ))
    found = json.loads(done.stdout)
    assert set(found) == set(WRONG)
    for line, (code, said, torch_came) in found.items():
        assert code == 2, line
        assert WRONG[line] in said
        assert said.count("\n") == 1
        assert not torch_came
