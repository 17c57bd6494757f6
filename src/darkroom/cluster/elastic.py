"""Workers that come and go: how many may train, and pauses in which they save before others go on.

A pause is asked for when the cluster fits another number of workers, when a machine is about to be
taken away, or when a worker gets SIGTERM. All workers save the same step and leave; others go on
from it. Pauses are not failures. A worker or a machine that is gone without a word is one: the others go on
from the newest checkpoint.

Which rows form which batch does not depend on how many workers there are, so the order is the same; sums are
added up differently, so the loss is the same to about 1e-6 and not to the bit.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from darkroom.cluster.connect import unless_set
from darkroom.cluster.private_ray import private, to_extend
from darkroom.errors import InputError, RecipeError

if TYPE_CHECKING:
    from darkroom.recipe.sections import TrainSettings

WATCHER = "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"
PLACING = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
PLACING_S = "15"
"""Seconds that Ray waits for the resources of a choice of workers before it chooses anew; its default is 60.

The choice counts a machine that is gone until Ray notices, some seconds later: only choosing anew helps.
"""
MONITOR_S = 10.0  # how often it is looked whether another number of workers fits
TAKEN_AWAY = "a machine is about to be taken away"
TOLD_TO_END = threading.Event()  # in a worker: SIGTERM came


class Paused(Exception):
    """The workers saved and left, so that others go on."""


@dataclass(frozen=True)
class WorkerRange:
    """At least and at most so many workers."""

    least: int
    most: int

    @classmethod
    def parsed(cls, text: str) -> WorkerRange:
        """From `N` or `MIN:MAX`; InputError for anything else."""
        low, colon, high = text.partition(":")
        numbers = [low, high] if colon else [low, low]
        if not all(part.isdecimal() for part in numbers) or not 1 <= int(numbers[0]) <= int(numbers[1]):
            raise InputError(f"--workers {text}", allowed="N, or MIN:MAX, 1 or more: 4, 2:8")
        return cls(int(numbers[0]), int(numbers[1]))

    @property
    def elastic(self) -> bool:
        """Whether the number of workers may change."""
        return self.least < self.most

    def __str__(self) -> str:
        return f"{self.least}:{self.most}" if self.elastic else str(self.least)


def allowed_counts(phases: Sequence[TrainSettings], span: WorkerRange) -> list[int]:
    """The numbers of workers within the span that share the global batch evenly, in every phase.

    Raises RecipeError where there is none.
    """
    if not span.elastic:
        _check_batches(phases, span.least)
        return [span.least]
    counts = []
    for count in range(span.least, span.most + 1):
        with suppress(RecipeError):
            _check_batches(phases, count)
            counts.append(count)
    if not counts:
        batches = " and ".join(dict.fromkeys(str(one.global_batch) for one in phases))
        raise RecipeError(
            "train.global_batch",
            f"{batches} (micro_batch {phases[0].micro_batch}) over {span} processes",
            mend="choose a number of workers that divides it",
        )
    return counts


def _check_batches(phases: Sequence[TrainSettings], count: int) -> None:
    """RecipeError unless so many share the global batch of each phase."""
    from darkroom.recipe.rules import check_batch

    for one in phases:
        check_batch(one, count)


def rounded_down(count: int, counts: Sequence[int]) -> int:
    """The greatest of the allowed counts that is not above; 0 where there is none."""
    return max((allowed for allowed in counts if allowed <= count), default=0)


def job_trainer(counts: Sequence[int], mail: Any, *, local: bool, **settings: Any) -> Any:
    """Ray's TorchTrainer; with several counts allowed its workers come and go, and pause.

    What Ray Train starts besides the workers are processes that wake a hundred times a second and take about
    one percent of a core each. Those of no use are left out: that of Ray's datasets, and in a Ray that ends
    with this job (`local`) that which looks for nodes that go (unless the user asked for it), that which
    clears up after a dead job and, where the number of workers is fixed, that which asks for nodes.
    """
    names = ("DatasetsCallback", "PlacementGroupCleanerCallback") if local else ("DatasetsCallback",)
    useless = tuple(private(name) for name in names)

    class PausingTrainer(to_extend("TorchTrainer")):  # type: ignore[misc]
        """As TorchTrainer, but for the policies and the processes left out."""

        def _create_default_callbacks(self) -> list[Any]:
            return [one for one in super()._create_default_callbacks() if not isinstance(one, useless)]

        def _initialize_and_run_controller(self, **given: Any) -> Any:
            given["failure_policy"] = _failure_policy(self.run_config.failure_config, mail)
            if len(counts) > 1:
                given["scaling_policy"] = scaling_policy(self.scaling_config, counts, mail)
            elif local:
                given["scaling_policy"] = _unasking_policy(self.scaling_config)
            watched = unless_set(WATCHER, "0") if local else nullcontext()
            placed = unless_set(PLACING, PLACING_S) if len(counts) > 1 else nullcontext()
            with watched, placed:
                return super()._initialize_and_run_controller(**given)

    return PausingTrainer(**settings)


def scaling_policy(scaling_config: Any, counts: Sequence[int], mail: Any) -> Any:
    """Ray's elastic policy, rounded to allowed counts; instead of cutting workers off it asks for a pause."""
    import ray

    noop, resize = private("NoopDecision"), private("ResizeDecision")

    class PausingScalingPolicy(to_extend("ElasticScalingPolicy")):  # type: ignore[misc]
        """Counts workers that fit on the nodes that live and will stay."""

        def _count_possible_workers(self, reserved_resources: Any) -> int:
            # What Ray reserved for the job may be some seconds old, and a node that drains takes no
            # workers: Ray would wait a minute for them there.
            alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]} - drained()
            there = {node: has for node, has in reserved_resources.items() if node in alive}
            return rounded_down(super()._count_possible_workers(there), counts)

        def make_decision_for_running_worker_group(self, worker_group_state: Any, **status: Any) -> Any:
            """Ray Train's hook: another number of workers is a pause, never a restart."""
            decision = super().make_decision_for_running_worker_group(worker_group_state, **status)
            if isinstance(decision, resize):
                why = f"the cluster now fits {decision.num_workers} workers"
                why += f" instead of {worker_group_state.num_workers}"
                gone = decision.num_workers < worker_group_state.num_workers and drained()
                ray.get(mail.ask_pause.remote(TAKEN_AWAY if gone else why))
            return noop()

    return PausingScalingPolicy(scaling_config)


def drained() -> set[str]:
    """The ids of nodes that take no workers any more, for they are about to go."""
    return set(private("draining")())


def _unasking_policy(scaling_config: Any) -> Any:
    """Ray's policy of a fixed number of workers, for a single machine that no other will join."""

    class UnaskingScalingPolicy(to_extend("FixedScalingPolicy")):  # type: ignore[misc]
        """Asks nobody for nodes."""

        def after_controller_start(self, train_run_context: Any) -> None:
            """Ray would start the process here that nodes are asked for by."""

        def _maybe_send_resource_request(self) -> None:
            """The machine is there."""

    return UnaskingScalingPolicy(scaling_config)


def _failure_policy(failure_config: Any, mail: Any) -> Any:
    """Ray's policy, for which a pause is no failure, and an error that would come again is the last."""
    import ray

    retry, give_up = private("FailureDecision.RETRY"), private("FailureDecision.RAISE")

    class PausingFailurePolicy(to_extend("DefaultFailurePolicy")):  # type: ignore[misc]
        def make_decision(self, training_failed_error: Exception) -> Any:
            """Retry after a pause, give up after a final error; else as Ray decides."""
            if ray.get(mail.end_pause.remote()):
                return retry
            if ray.get(mail.over.remote()):
                return give_up
            return super().make_decision(training_failed_error)

    return PausingFailurePolicy(failure_config)


def listening_callback() -> Any:
    """What has every worker note SIGTERM instead of dying of it."""

    class Listening(to_extend("WorkerGroupCallback")):  # type: ignore[misc]
        def after_worker_group_start(self, worker_group: Any) -> None:
            worker_group.execute(_note_sigterm)

    return Listening()


def _note_sigterm() -> None:
    """In a worker's main thread: the first SIGTERM is noted, a second one ends it."""

    def note(number: int, frame: Any) -> None:
        if TOLD_TO_END.is_set():
            os._exit(1)
        TOLD_TO_END.set()

    if threading.current_thread() is threading.main_thread():  # elsewhere Python takes no signals
        signal.signal(signal.SIGTERM, note)


def why_leave() -> str:
    """In a worker: why this machine or process is about to go, or nothing."""
    if TOLD_TO_END.is_set():
        return f"rank {os.environ.get('RANK', '?')} was asked to stop"
    try:
        info = private("train_context")().preemption_context.preemption_info
    except (RuntimeError, AttributeError) as error:  # not public: a later Ray may have it elsewhere
        logging.getLogger(__name__).debug("pre-emption is not looked for: %s", error)
        return ""
    return TAKEN_AWAY if info is not None else ""
