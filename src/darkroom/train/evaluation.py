"""What is looked at while training goes on: held-out loss by timestep, and sample grids."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from darkroom.bill import Meter, format_seconds
from darkroom.hardware.system import atomic_replace, remove_file, write_atomically
from darkroom.recipe.sections import SamplePrompt, SampleSettings
from darkroom.run import PROMPTS, Run
from darkroom.train.checkpoint import Checkpoint
from darkroom.train.jobs import Say, TrainingSetup
from darkroom.train.memory import laid_aside
from darkroom.train.ranks import HangWatchdog
from darkroom.train.step import Weights, held_rows, micro_batches
from darkroom.train.tasks.encoders import Autoencoder, LearnTinyVae
from darkroom.train.tracking import Tracker

if TYPE_CHECKING:
    from darkroom.models.model import Model
    from darkroom.train.ranks import StopRequest
    from darkroom.train.tasks.diffusion import Task


@torch.no_grad()
def heldout_metrics(task: Task, inputs: Mapping[str, Tensor], micro_batch: int) -> dict[str, Any]:
    """Means over the held-out rows: `heldout_loss`, and `heldout_loss_by_timestep` as {timestep: loss}."""
    parts = [task.heldout(micro) for micro in micro_batches(inputs, micro_batch)]
    found: dict[str, Any] = {}
    for name in parts[0]:
        mean = torch.cat([part[name] for part in parts]).cpu().double().mean(dim=0).tolist()
        found[name] = dict(zip(map(str, task.points), mean, strict=True)) if isinstance(mean, list) else mean
    return found


def _sample_grid(
    model: Model,
    settings: SampleSettings,
    prompts: Sequence[str | SamplePrompt],
    size: int,
    path: Path,
    progress: Callable[[int, int], None] | None = None,
    **how: Any,
) -> Path:
    """Draw the prompts' pictures, `size` pixels square, and save them as one PNG.

    `how` is what `generate` takes besides.
    """
    from darkroom import sample

    images: list[Any] = []
    for call_settings, some in together(settings, prompts):
        pictures = sample.generate(
            model,
            some,
            size=(size, size),
            optimise="none",  # the weights stay where and as they are, also where ranks share them
            progress=progress,
            notice=lambda _: None,
            **call_settings,
            **how,
        )
        images += [picture.image for picture in pictures]
    return _save_grid(images, path)


def together(
    settings: SampleSettings, prompts: Sequence[str | SamplePrompt]
) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Neighbouring prompts that one call of `generate` draws, with its settings: picture i has seed + i."""
    held: list[str] = []
    now: dict[str, Any] = {}
    for i, given in enumerate(prompts):
        call_settings = settings.of(i, given)
        if held and call_settings != now | {"seed": now["seed"] + len(held)}:
            yield now, held
            held = []
        if not held:
            now = call_settings
        held.append(given if isinstance(given, str) else given.prompt)
    if held:
        yield now, held


@torch.no_grad()
def _reconstruction_grid(task: Autoencoder | LearnTinyVae, inputs: Mapping[str, Tensor], path: Path) -> Path:
    """Held-out pictures above what the VAE gives back, as one PNG."""
    from PIL import Image

    pixels_b3HW = inputs["pixels"][:8]
    out_b3HW = task.reconstruct(pixels_b3HW)
    images = []
    for tensor_3HW in (*pixels_b3HW, *out_b3HW):
        bytes_HW3 = ((tensor_3HW.float() + 1) * 127.5).round().clamp(0, 255).byte().permute(1, 2, 0)
        images.append(Image.fromarray(bytes_HW3.cpu().numpy()))
    return _save_grid(images, path, columns=len(pixels_b3HW))


def _save_grid(images: Sequence[Any], path: Path, columns: int | None = None) -> Path:
    """One PNG of all images, written atomically."""
    from darkroom.sample.pictures import make_grid

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    make_grid(images, columns).save(temporary, format="PNG")
    return atomic_replace(temporary, path)


KIND = "best"  # what a checkpoint calls them


@dataclass(frozen=True)
class Best:
    """After which step they are, the averaged weights by name, and what the task measured with them.

    Where ranks share the weights, the rows of this one.
    """

    step: int
    values: Mapping[str, Tensor]
    measured: Mapping[str, float]

    @classmethod
    def of(cls, step: int, values: Mapping[str, Tensor], measured: Mapping[str, float], run: Path) -> Best:
        """A copy of these weights."""
        return cls(step, laid_aside(values, run), measured)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, weights: Weights, run: Path) -> Best | None:
        """Those that a checkpoint holds; None where it has none."""
        saved = checkpoint.scalars.get(KIND)
        if saved is None:
            return None
        return cls.of(saved["step"], held_rows(checkpoint.tensors[KIND], weights), saved["measured"], run)

    @property
    def scalars(self) -> dict[str, Any]:
        """What a checkpoint says of them besides their values."""
        return {"step": self.step, "measured": dict(self.measured)}


TOLD_EVERY_S = 15.0
"""Between two lines about pictures that take long to draw."""


class Abandoned(Exception):
    """Pictures are not worth waiting for when the user wants to stop."""


class Evaluator:
    """Looks with the averaged weights, in evaluation mode; what it takes is in the bill by kind."""

    def __init__(
        self,
        job: TrainingSetup,
        run: Run,
        *,
        meter: Meter,
        watch: HangWatchdog,
        stop: StopRequest,
        tracker: Tracker,
        say: Say,
    ) -> None:
        self._job, self._run, self._meter, self._watch = job, run, meter, watch
        self._stop, self._tracker, self._say = stop, tracker, say
        self._ranks, self._task = job.ranks, job.task

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within, the model holds the averaged weights and is in evaluation mode."""
        step = self._job.step
        for module in self._task.modules.values():
            module.eval()
        try:
            with step.weights.showing(step.averaged()):
                yield
        finally:
            for module in self._task.modules.values():
                module.train()

    # ---- numbers

    def evaluate(self, k: int) -> dict[str, Any]:
        """The held-out loss after step k, by timestep too; nothing where no rows are held out."""
        if self._job.heldout is None:
            return {}
        self._watch.note(k, "evaluate")
        with self._meter.part("evaluate"), self.averaged():
            return heldout_metrics(self._task, self._job.heldout, self._job.step.micro_batch)

    def scores_due(self, k: int) -> bool:
        """Whether step k brings the pictures trained on to another multiple of `evaluate.every_images`."""
        every, batch = self._job.recipe.evaluate.every_images, self._job.recipe.train.global_batch
        return bool(every) and k * batch // every > (k - 1) * batch // every

    def score(self, k: int) -> dict[str, Any]:
        """Scores of pictures drawn with held-out prompts; nothing where the job is asked to stop."""
        scores = self._job.scores
        if scores is None or not self._draws():
            return {}
        with self._meter.part("evaluate"), self.averaged():
            try:
                return scores(
                    self._task.model, self._run.path, self._drawing(k, tells=False), scores=self._ranks.first
                )
            except Abandoned:
                return {}

    def standing(self, k: int, newest: float | None = None) -> tuple[int, bool]:
        """The step of the best held-out loss so far, and whether it is `evaluate.patience` evaluations ago.

        The latter is said aloud.
        """
        patience = self._job.recipe.evaluate.patience
        if patience is None:
            return k, False
        rows: list[tuple[int, float]] = self._ranks.broadcast(lambda: self._heldout_losses(k, newest))
        if not rows:
            return k, False
        best_step, best = min(rows, key=lambda row: row[1])
        since = sum(step > best_step for step, _ in rows)
        if since < patience:
            return best_step, False
        self._say(
            f"held-out loss has not got better for {since} evaluations (best {best:.4g} at step "
            f"{best_step}): training ends here"
        )
        return best_step, True

    def _heldout_losses(self, k: int, newest: float | None) -> list[tuple[int, float]]:
        """Those of all evaluations by step; what is no number is worse than any."""
        rows = [(row["step"], row["heldout_loss"]) for row in self._run.metrics() if "heldout_loss" in row]
        rows += [] if newest is None else [(k, newest)]
        return [(step, math.inf if loss is None or math.isnan(loss) else loss) for step, loss in rows]

    # ---- pictures

    def sample_if_missing(self, k: int) -> None:
        """A run that was stopped while it drew the pictures of step k draws them now."""
        every = self._job.recipe.sample.every
        due = k and every and k % every == 0
        if due and not self._ranks.broadcast(self._path(k).exists):
            self.sample(k)

    def sample(self, k: int) -> None:
        """The grid of samples after step k; none where the job is asked to stop."""
        path, settings = self._path(k), self._job.recipe.sample
        if not self._draws():
            return
        if not self._ranks.first:  # its part of the weights is needed, its pictures are not
            path = path.with_name(f".{path.name}.{self._ranks.rank}")
        with self._meter.part("sample"), self.averaged():
            try:
                if isinstance(self._task, Autoencoder | LearnTinyVae):
                    if self._job.heldout is None:
                        return
                    _reconstruction_grid(self._task, self._job.heldout, path)
                elif self._job.prompts:
                    size = self._job.recipe.data.resolution
                    drawing = self._drawing(k)
                    how = self._job.recipe.data.reading
                    _sample_grid(self._task.model, settings, self._job.prompts, size, path, drawing, **how)
                    self._note_prompts()
            except Abandoned:
                return
        if not self._ranks.first:
            remove_file(path)
        elif path.exists():
            self._tracker.picture(k, "samples", path)

    def _note_prompts(self) -> None:
        """What the grids' pictures are of, in their order."""
        prompts = [one if isinstance(one, str) else one.model_dump() for one in self._job.prompts]
        if self._ranks.first:
            write_atomically(
                self._run.path / PROMPTS,
                json.dumps(prompts, ensure_ascii=False, indent=1) + "\n",
                durable=True,
            )

    def _path(self, k: int) -> Path:
        return self._run.samples / f"step-{k:08d}.png"

    def _draws(self) -> bool:
        """Whether this rank draws: rank 0, and all of them where each holds a part of the weights."""
        return self._ranks.first or self._ranks.sharded

    def _drawing(self, k: int, *, tells: bool = True) -> Callable[[int, int], None]:
        """A progress callback that tells of long waits and ends the work when a stop was asked for."""
        began = shown_at = time.monotonic()

        def drawn(done: int, total: int) -> None:
            """Show how far a long grid is. Raises Abandoned when the run is to stop."""
            nonlocal shown_at
            self._watch.note(k, "sample")
            now = time.monotonic()
            if tells and now - shown_at >= TOLD_EVERY_S and done < total and self._ranks.first:
                shown_at = now
                left = format_seconds((now - began) / done * (total - done))
                self._say(f"drawing pictures at step {k}: {100 * done / total:.0f} %, {left} left")
            if self._stop.asked and not self._ranks.sharded:  # the others need this rank's part
                raise Abandoned

        return drawn
