"""The command line: parse, call one function, print. No logic lives here.

Exit codes: 0 done, 1 failed or stopped, 2 wrong input (one line says what was given, what is allowed and
how to mend it). `--json` prints one object for machines. Everything heavy is imported by the verb that
needs it, so `--help` answers at once.

`application` holds the application and how it prints; the other files hold the verbs, by subject.
Importing them here puts the verbs in place.
"""

# In the order in which `darkroom --help` lists them.
from darkroom.cli import data, training, planning, pictures, serving, evaluating, machine, benchmarks  # noqa: I001
from darkroom.cli.application import app, bench, main

__all__ = [
    "app",
    "bench",
    "benchmarks",
    "data",
    "evaluating",
    "machine",
    "main",
    "pictures",
    "planning",
    "serving",
    "training",
]
