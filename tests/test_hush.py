"""What other libraries remark is not heard, what they complain of is."""

import os
import subprocess
import sys

import pytest

REMARKS = """
import logging
from darkroom.libraries import hush
if {hushed}:
    hush()
from diffusers.utils import logging as diffusers_logging
logging.getLogger("torchao.kernels").warning("a remark of torchao")
logging.getLogger("torchao.kernels").error("a complaint of torchao")
diffusers_logging.get_logger("diffusers.pipelines").warning("a remark of diffusers")
"""


IMPORTED = """
import os, sys
before = dict(os.environ)
import darkroom, darkroom.recipe, darkroom.hardware, darkroom.errors
assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())
assert not {"torch", "diffusers", "transformers", "ray"} & set(sys.modules)
from darkroom.cli import main
try:
    main(["--version"])
except SystemExit:
    pass
print(os.environ["GOMP_SPINCOUNT"])
"""


@pytest.mark.parametrize(("given", "is_left"), [(None, "10000"), ("7", "7")])
def test_importing_changes_nothing_and_the_command_line_limits_spinning(given, is_left) -> None:
    env = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    env |= {"GOMP_SPINCOUNT": given} if given else {}
    ran = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, env=env)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split()[-1] == is_left


@pytest.mark.parametrize("hushed", [True, False])
def test_remarks_are_silenced_and_complaints_are_not(hushed: bool) -> None:
    code = REMARKS.format(hushed=hushed)
    unsaid = {name: value for name, value in os.environ.items() if not name.endswith("_VERBOSITY")}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=unsaid)
    told = ran.stderr
    assert ("a remark of torchao" in told) is not hushed
    assert ("a remark of diffusers" in told) is not hushed
    assert "a complaint of torchao" in told
