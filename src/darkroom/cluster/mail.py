"""What workers and driver tell each other: one small actor, on the driver's machine."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Mail:
    """Lines for the console, how workers ended, and what they are asked to do."""

    lines: list[str] = field(default_factory=list)
    ends: list[tuple[str, int, bool, str]] = field(default_factory=list)
    stop: bool = False
    pause: str = ""  # why the workers are to save and leave
    left: bool = False  # whether one did
    pauses: int = 0
    result: dict[str, Any] | None = None
    starts: int = 0
    reported: int = 0  # losses that the console has shown
    heard_at: float = -math.inf  # when a worker last asked whether it is to stop
    controller: Any = None  # the actor by which Ray Train runs the job

    def say(self, line: str) -> None:
        """A line for the console."""
        self.lines.append(line)

    def take(self) -> list[str]:
        """The lines that came since the last time."""
        taken, self.lines = self.lines, []
        return taken

    def news(self) -> tuple[float, list[str]]:
        """For how long no worker has asked anything, and the lines that came."""
        return self.silent_s(), self.take()

    def begin(self) -> tuple[int, int]:
        """How often the workers have been started, and after how many pauses; rank 0 counts."""
        self.starts += 1
        return self.starts, self.pauses

    def new_starts(self) -> int:
        """How often workers were started again because some were lost."""
        return max(0, self.starts - 1 - self.pauses)

    def newly_lost(self) -> int:
        """The same where it grew since it was asked; 0 otherwise."""
        lost, before = self.new_starts(), self.reported
        self.reported = lost
        return lost if lost > before else 0

    def fail(self, kind: str, exit_code: int, final: bool, message: str) -> None:
        """How a worker ended: the error's kind, its exit code, and whether starting again is of no use."""
        self.ends.append((kind, exit_code, final, message))

    def failed(self) -> list[tuple[str, int, bool, str]]:
        """All such ends."""
        return self.ends

    def over(self) -> bool:
        """Whether starting again is of no use."""
        return any(final for _, _, final, _ in self.ends)

    def control(self, controller: Any) -> None:
        """By which actor Ray Train runs the job."""
        self.controller = controller

    def controlled_by(self) -> Any:
        """The same, for the driver; None until it runs."""
        return self.controller

    def ask_stop(self) -> None:
        """Have the workers save and stop for good."""
        self.stop = True

    def stops(self) -> bool:
        """Whether the workers are to save and stop; each of them asks all the time."""
        self.heard_at = time.monotonic()
        return self.stop or bool(self.pause)

    def silent_s(self) -> float:
        """For how long no worker has asked anything: without end where none has run yet."""
        return time.monotonic() - self.heard_at

    def ask_pause(self, why: str) -> None:
        """Have them save and leave, so that others go on."""
        if not self.pause:
            self.pause = why
            self.say(f"{why}: saving, then going on")

    def leave(self) -> bool:
        """Whether a worker that saved and stopped did so for a pause."""
        self.left = bool(self.pause) and not self.stop
        return self.left

    def end_pause(self) -> bool:
        """Whether the workers ended for a pause, which is over then."""
        ended, self.left, self.pause = self.left, False, ""
        self.pauses += ended
        return ended

    def made(self, result: dict[str, Any]) -> None:
        """What rank 0 made in the end."""
        self.result = result

    def what_was_made(self) -> dict[str, Any] | None:
        """The same, for the driver."""
        return self.result
