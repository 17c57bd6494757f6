"""Schedules of the simulation: no accepted job is lost, doubled, changed, or waits for ever."""

from __future__ import annotations

import os
from unittest import mock

import pytest

from darkroom.serve.jobs import store
from serve.simulation import Violation, run

SHORT = 8
NIGHTLY = int(os.environ.get("SIMULATION_SEEDS", "1000"))


def run_all(seeds: range) -> None:
    for seed in seeds:
        run(seed)


@pytest.mark.parametrize("seed", range(SHORT))
def test_a_schedule_keeps_every_promise(seed):
    run(seed)


def test_a_seed_is_one_schedule():
    assert run(5).trace == run(5).trace
    assert run(5).trace != run(6).trace


def test_a_store_that_forgets_is_found_out():
    """The control: with a fault in the server itself some schedule fails."""
    with (
        mock.patch.object(store.JobStore, "start", lambda self, uid, _: self.forget([uid])),
        pytest.raises(Violation, match="unknown|waiting|are there"),
    ):
        run_all(range(20))


@pytest.mark.nightly
def test_many_schedules():
    run_all(range(SHORT, NIGHTLY))
