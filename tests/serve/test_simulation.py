"""Schedules of the simulation: no accepted job is lost, doubled, changed, or waits for ever; no key that
always waits gets less than its share while another gets more.
"""

from __future__ import annotations

import os
from unittest import mock

import pytest

from darkroom.serve.engine import tickets
from darkroom.serve.jobs import store
from serve import simulation
from serve.simulation import BEHIND, Violation, run

SHORT = 8
NIGHTLY = int(os.environ.get("SIMULATION_SEEDS", "1000"))


def run_all(seeds: range, *, crowd: bool = False) -> None:
    for seed in seeds:
        run(seed, crowd=crowd)


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


@pytest.mark.parametrize("seed", [0, 5])
def test_keys_that_always_wait_get_their_shares(seed):
    """One was served alone for as long as it had pictures: each look at a full engine gave it new credit."""
    of = run(seed, crowd=True)
    assert of.given_together > 20, "the control: much was given while others waited"
    assert 0 < of.furthest_behind <= BEHIND


def free_of_charge(self: tickets._Ring, admits: tickets.Admits) -> tickets.Entry:
    """`take` by a scheduler that charges nothing."""
    assert self.head(admits) is not None
    return self.flows[self.turns[0]].take(admits)


def credited_at_each_look(self: tickets._Ring, admits: tickets.Admits) -> tickets.Entry | None:
    """`head` by a scheduler that forgets whose turn was credited."""
    self.credited = False
    return HEAD(self, admits)


HEAD = tickets._Ring.head


@pytest.mark.parametrize(("name", "wrong"), [("take", free_of_charge), ("head", credited_at_each_look)])
def test_a_scheduler_that_breaks_the_shares_is_found_out(name, wrong):
    with (
        mock.patch.object(tickets._Ring, name, wrong),
        pytest.raises(Violation, match="always has pictures waiting, and got"),
    ):
        run_all(range(12), crowd=True)


def test_shares_that_are_not_kept_are_found_out():
    """The same scheduler, but of other shares than were promised."""
    with (
        mock.patch.dict(simulation.SHARES, {"alice": 20}),
        mock.patch.object(simulation.Limits, "shares", {}),
        pytest.raises(Violation, match="less, by share"),
    ):
        run_all(range(12), crowd=True)


@pytest.mark.nightly
def test_many_crowds():
    run_all(range(100), crowd=True)


@pytest.mark.nightly
def test_many_schedules():
    run_all(range(SHORT, NIGHTLY))
