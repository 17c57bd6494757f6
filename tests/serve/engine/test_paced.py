"""On a card at most two steps are on their way, and a step's time is that of the card."""

from __future__ import annotations

import threading
import time

import torch

from darkroom.serve.engine.executors import AHEAD, Between, Paced, places_for


class Card:
    """Takes steps one by one, as a card does: a launch returns at once."""

    def __init__(self) -> None:
        self.launched, self.done, self.most = 0, 0, 0
        self._changed = threading.Condition()

    def launch(self) -> None:
        with self._changed:
            self.launched += 1
            self.most = max(self.most, self.launched - self.done)

    def finish(self) -> None:
        with self._changed:
            self.done += 1
            self._changed.notify_all()

    def event(self):
        return Mark(self)

    def wait(self, upto: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.done >= upto, 20)


class Mark:
    def __init__(self, card: Card) -> None:
        self._card, self._at = card, 0

    def record(self) -> None:
        self._at = self._card.launched

    def synchronize(self) -> None:
        self._card.wait(self._at)


def most_on_their_way(steps) -> int:
    """Of eight steps that a slow card takes."""
    card = steps[0]
    over = threading.Event()

    def slowly() -> None:
        while not over.is_set():
            time.sleep(0.005)
            if card.done < card.launched:
                card.finish()

    thread = threading.Thread(target=slowly)
    thread.start()
    for _ in range(8):
        steps[1].put(card.launch)
        steps[1].pace()
    over.set()
    thread.join()
    return card.most


def test_two_steps_are_launched_and_no_more():
    card = Card()
    assert most_on_their_way((card, Paced(card.event))) == AHEAD == 2
    unpaced = Card()
    assert most_on_their_way((unpaced, Between())) > 2  # the control


def test_a_cpu_is_not_paced():
    steps, aside = places_for(torch.device("cpu"), 1, 1)
    try:
        assert not isinstance(steps, Paced)
        steps.pace()
    finally:
        aside.close()
        steps.close()
