"""What is counted, for Prometheus; a registry of its own, so that two servers in a process do not mix."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from prometheus_client import (
    GC_COLLECTOR,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from darkroom import __version__

STEP_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
WAIT_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)
CANCEL_BUCKETS = (0, 1, 2, 4, 8)
SECONDS_BUCKETS = (0.001, 0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 900)
PHASES = ("queue", "text", "denoise", "decode", "write")
ROW_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)


OF_KEY = re.compile(rb"darkroom_key_\w+\{")
"""Samples that are counted by key."""


class Metrics:
    """The server's counters, each with its meaning in its help text."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        at = self.registry
        self.waiting = Gauge("darkroom_queue_pictures", "Pictures waiting to be admitted", registry=at)
        self.rows = Gauge("darkroom_rows", "Pictures being denoised", registry=at)
        self.capacity = Gauge(
            "darkroom_capacity_rows", "U-Net evaluations a step that are admitted", registry=at
        )
        self.live_jobs = Gauge("darkroom_jobs_live", "Jobs accepted and not over", registry=at)
        self.ready = Gauge("darkroom_ready", "1 while new jobs are taken", registry=at)
        self.evaluations = Histogram(
            "darkroom_step_evaluations",
            "U-Net evaluations in one step of one size",
            buckets=ROW_BUCKETS,
            registry=at,
        )
        self.step_seconds = Histogram(
            "darkroom_step_seconds", "A step of one size", buckets=STEP_BUCKETS, registry=at
        )
        self.queue_seconds = Histogram(
            "darkroom_queue_wait_seconds",
            "From acceptance to the first step",
            buckets=WAIT_BUCKETS,
            registry=at,
        )
        self.job_seconds = Histogram(
            "darkroom_job_seconds",
            "From acceptance to the stored pictures",
            buckets=WAIT_BUCKETS,
            registry=at,
        )
        self.cancel_steps = Histogram(
            "darkroom_cancel_steps",
            "Steps of a row that ended after its job was stopped, until it was free",
            buckets=CANCEL_BUCKETS,
            registry=at,
        )
        self.steps = Counter("darkroom_picture_steps", "Steps taken, counted by picture", registry=at)
        self.accepted = Counter("darkroom_jobs_accepted", "Jobs accepted", registry=at)
        self.over = Counter("darkroom_jobs_over", "Jobs that ended", ["state"], registry=at)
        self.refused = Counter("darkroom_requests_refused", "Requests refused", ["code"], registry=at)
        self.pictures = Counter("darkroom_pictures", "Pictures finished", registry=at)
        self.pixels = Counter("darkroom_pixels", "Pixels of pictures finished", registry=at)
        self.swaps = Counter("darkroom_adapter_swaps", "Adapters copied into a slot of the bank", registry=at)
        self.device_seconds = Counter("darkroom_device_seconds", "Device time of finished jobs", registry=at)
        self.usd = Counter("darkroom_usd", "Price of finished jobs' device time", registry=at)
        self.device_memory = Gauge("darkroom_device_memory_bytes", "Memory in use on the device", registry=at)
        self.net_memory = Gauge("darkroom_net_memory_bytes", "Nets of --controls in memory", registry=at)
        self.request_seconds = Histogram(
            "darkroom_http_request_seconds",
            "From a request's first byte to the last of its answer, by route; probes left out",
            ["route"],
            buckets=SECONDS_BUCKETS,
            registry=at,
        )
        self.phase_seconds = Histogram(
            "darkroom_phase_seconds",
            "Of finished jobs: waiting, text encoding, denoising, decoding, writing",
            ["phase"],
            buckets=SECONDS_BUCKETS,
            registry=at,
        )
        for phase in PHASES:
            self.phase_seconds.labels(phase)
        self.queue_age = Gauge(
            "darkroom_queue_age_seconds", "How long the oldest job that waits has waited", registry=at
        )
        self.key_jobs = Counter("darkroom_key_jobs", "Jobs accepted, by key", ["key"], registry=at)
        self.key_pictures = Counter(
            "darkroom_key_pictures", "Pictures finished, by key", ["key"], registry=at
        )
        self.key_device_seconds = Counter(
            "darkroom_key_device_seconds", "Device time of finished jobs, by key", ["key"], registry=at
        )
        self.build = Info("darkroom_build", "Version, model and how it is computed", registry=at)
        self.build.info({"version": __version__})
        self.requests = Counter(
            "darkroom_http_requests", "Answers by status", ["method", "status"], registry=at
        )
        self._collect_process()

    def _collect_process(self) -> None:
        """Memory, files and garbage collections of this process, and its Python."""
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.registry.register(GC_COLLECTOR)

    def look(
        self,
        *,
        ready: Callable[[], bool],
        queue_age_s: Callable[[], float],
        device_bytes: Callable[[], float],
        net_bytes: Callable[[], float],
    ) -> None:
        """Have what changes by itself looked up at each scrape, on whichever port it comes."""
        self.ready.set_function(lambda: float(ready()))
        self.queue_age.set_function(queue_age_s)
        self.device_memory.set_function(device_bytes)
        self.net_memory.set_function(net_bytes)

    def follow_models(
        self,
        models: Mapping[str, tuple[Callable[[], float], Callable[[], float]]],
        *,
        rows: Callable[[], float],
        waiting: Callable[[], float],
        capacity: Callable[[], float],
    ) -> None:
        """With several models: the bytes in memory and the pictures waiting of each, their loads and
        releases; what is said of the server is of all its engines together."""
        at = self.registry
        memory = Gauge("darkroom_model_memory_bytes", "Weights in memory, by model", ["model"], registry=at)
        queue = Gauge("darkroom_model_queue_pictures", "Pictures waiting, by model", ["model"], registry=at)
        self.model_loads = Counter("darkroom_model_loads", "Times loaded, by model", ["model"], registry=at)
        self.model_releases = Counter(
            "darkroom_model_releases", "Times released for another, by model", ["model"], registry=at
        )
        self.model_load_seconds = Histogram(
            "darkroom_model_load_seconds", "Loading a model", buckets=SECONDS_BUCKETS, registry=at
        )
        for name, (its_bytes, its_waiting) in models.items():
            memory.labels(name).set_function(its_bytes)
            queue.labels(name).set_function(its_waiting)
            self.model_loads.labels(name)
            self.model_releases.labels(name)
        self.rows.set_function(rows)
        self.waiting.set_function(waiting)
        self.capacity.set_function(capacity)

    def text(self) -> bytes:
        """All of them in Prometheus' text format."""
        return generate_latest(self.registry)

    def text_for(self, key: str) -> bytes:
        """The same for one of several keys: how much the others draw is none of its business."""
        own = f'{{key="{key}"}}'.encode()
        lines = self.text().splitlines(keepends=True)
        return b"".join(line for line in lines if not OF_KEY.match(line) or own in line)
