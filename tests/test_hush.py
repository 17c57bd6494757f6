"""What other libraries remark is not heard, what they complain of is."""

import os
import subprocess
import sys

import pytest

REMARKS = """
import logging
from darkroom.hush import hush
if {hushed}:
    hush()
from diffusers.utils import logging as diffusers_logging
logging.getLogger("torchao.kernels").warning("a remark of torchao")
logging.getLogger("torchao.kernels").error("a complaint of torchao")
diffusers_logging.get_logger("diffusers.pipelines").warning("a remark of diffusers")
"""


@pytest.mark.parametrize("hushed", [True, False])
def test_remarks_are_silenced_and_complaints_are_not(hushed: bool) -> None:
    code = REMARKS.format(hushed=hushed)
    unsaid = {name: value for name, value in os.environ.items() if not name.endswith("_VERBOSITY")}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=unsaid)
    told = ran.stderr
    assert ("a remark of torchao" in told) is not hushed
    assert ("a remark of diffusers" in told) is not hushed
    assert "a complaint of torchao" in told
