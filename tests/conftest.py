"""What all tests share: real material, when it lies beside the project, and a PostgreSQL."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

# Else each of the hundreds of processes that tests start would compile torch, Ray and transformers anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Before torch is imported: two thread counts differ in last bits, and two tests at once share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
# Tests of what pictures are made of compare files; those of marks and credentials ask for them.
os.environ["DARKROOM_PROVENANCE"] = "0"

import home  # moves HOME before any library looks for its caches and settings
import nightly
from needs import missing
from own_postgres import PROGRAMS, OwnPostgres

sys.dont_write_bytecode = False
gc.disable()  # until everything is imported and collected: nearly all of that stays
LOOKED_AT_ALL_EVERY = 400  # tests
TESTS = pytest.StashKey[int]()
COUNT_FROZEN = gc.get_freeze_count
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """The user's own home is as it was; says what a test left there and fails the run."""
    if home.is_mine() and (left := home.written()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print(f"\nFAILED: tests wrote to the user's home: {', '.join(left)}")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Of a worker that ended by itself, how: xdist names the test only."""
    if error:
        with suppress(Exception):  # execnet says in no public place what it started
            print(f"\nFAILED: {node.gateway.id} ended with {node.gateway._io.popen.wait(10)}", flush=True)


def pytest_unconfigure() -> None:
    home.remove()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    is_left_out = nightly.is_chosen(config) and collection_path.is_file()
    return True if is_left_out and not nightly.may_hold(collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if nightly.is_chosen(config):
        nightly.arrange(items)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):
        found = [one for kept in terminalreporter.stats.values() for one in kept]
        reports = [one for one in found if isinstance(one, pytest.TestReport)]
        terminalreporter.section("seconds by module, or group of modules")
        for name, seconds in list(nightly.seconds_by_group(reports).items())[:40]:
            terminalreporter.write_line(f"{seconds:7.1f} {name}")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        gc.enable()  # here nothing is collected, the workers do that


def pytest_collection_finish() -> None:
    gc.enable()
    _leave_out_of_collections(of_all=True)
    # It walks all that is frozen, and each training run asks whether anything is.
    gc.get_freeze_count = lambda: 1


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Two million objects stay for good; a search for garbage, as each training run makes one, skips them."""
    yield
    tests = item.config.stash[TESTS] = item.config.stash.get(TESTS, 0) + 1
    _leave_out_of_collections(of_all=tests % LOOKED_AT_ALL_EVERY == 0)


def _leave_out_of_collections(*, of_all: bool) -> None:
    if of_all:
        gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture
def counts_frozen(monkeypatch) -> None:
    """`gc.get_freeze_count` itself."""
    monkeypatch.setattr(gc, "get_freeze_count", COUNT_FROZEN)


@pytest.fixture(autouse=True)
def _log_as_a_new_process() -> None:
    """A command run in this process leaves its log level behind; each test starts anew."""
    logger = logging.getLogger("darkroom")
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
    logger.handlers.clear()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real material; a test that needs it says so when it is missing."""
    if not SHARED.is_dir():
        pytest.skip("the real material is missing: no folder shared/data beside the project")
    return SHARED


@pytest.fixture(scope="session")
def postgres(tmp_path_factory) -> Iterator[str]:
    """The URL of a PostgreSQL of our own on a local socket."""
    if not PROGRAMS:
        missing("no PostgreSQL here: apt-get install postgresql")
    with OwnPostgres(Path("/tmp") / f"darkroom-pg-{os.getpid()}", fsync=False) as database:
        yield database.url
