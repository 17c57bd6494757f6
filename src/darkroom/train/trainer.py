"""The training loop: one for every task."""

from __future__ import annotations

import gc
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from darkroom.bill import Bill, Meter, format_seconds, format_usd
from darkroom.counting import UncountedOperation
from darkroom.errors import CheckpointError, DarkroomError, Stopped, is_disk_full
from darkroom.hardware.system import write_atomically
from darkroom.run import BILL, ENDED, Run
from darkroom.train.checkpoint import Checkpoint
from darkroom.train.checkpoint_storage import LocalPlace, Saver, newest, place_of
from darkroom.train.evaluation import KIND as BEST
from darkroom.train.evaluation import Best, Evaluator
from darkroom.train.exports import Exporter
from darkroom.train.jobs import COUNT_AFTER_S, Say, TrainingSetup, flops_per_image, projected, utilisation
from darkroom.train.optim import optimiser_numbers, optimiser_tensors, restore_optimiser
from darkroom.train.ranks import ALONE, Agreement, HangWatchdog, Ranks, StopRequest
from darkroom.train.step import StepResult, held_rows
from darkroom.train.tracking import Tracker

BILL_EVERY_S = 10.0  # what a killed process's bill may lack


@dataclass(frozen=True)
class TrainResult:
    """A finished run. `model` is there unless the run made an adapter; `outputs` are what it made.

    They are the weights after step `results_step`, the last one unless `evaluate.patience` is set;
    `heldout_loss` is theirs.
    """

    run: Path
    model: Path
    outputs: list[Path]
    steps: int
    results_step: int
    loss: float | None
    heldout_loss: float | None
    bill: Bill

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "run": str(self.run),
            "model": str(self.model) if self.model in self.outputs else None,
            "outputs": [str(path) for path in self.outputs],
            "steps": self.steps,
            "results_step": self.results_step,
            "loss": self.loss,
            "heldout_loss": self.heldout_loss,
            "bill": self.bill.model_dump(mode="json"),
        }


@dataclass
class _Window:
    """What was measured since metrics were last written."""

    results: list[tuple[int, StepResult, float]] = field(default_factory=list)  # step, result, waited s
    started: float = field(default_factory=time.perf_counter)


class Trainer:
    """Trains a job in a run's folder, from where it stands to the end."""

    def __init__(
        self, job: TrainingSetup, run: Run, *, tracker: Tracker, say: Say, meter: Meter | None = None
    ) -> None:
        """`meter` has counted what came before; without one the bill begins here."""
        self.job, self.run, self.tracker, self.say = job, run, tracker, say
        self.recipe, self.task, self.step = job.recipe, job.task, job.step
        self.k = 0
        ranks, settings = job.ranks, job.recipe.checkpoint
        self.ranks = ranks
        self.meter = meter or Meter(job.device, run.bill(), num_devices=job.num_devices)
        place = place_of(settings.url, run.path)
        self.saver = Saver(place, keep=settings.keep, ranks=ranks, say=say, background=settings.background)
        self._agreed = Agreement(ranks)
        self._watch = HangWatchdog(ranks, job.recipe.parallel.timeout_s, print)
        self.last_row: dict[str, Any] = {}
        self._window = _Window()
        self._stop = StopRequest(self._left_at_once)
        watch, meter, stop = self._watch, self.meter, self._stop
        self._evaluator = Evaluator(job, run, meter=meter, watch=watch, stop=stop, tracker=tracker, say=say)
        self._guard = NonfiniteGuard(run.path, job.rows_of, ranks)
        self._flops, self._prior, self._began_at = job.flops, Bill(), 0
        self._best: Best | None = None  # kept where patience is set
        self._ended = False  # before the last step, because the held-out loss stands still
        self._billed = time.perf_counter()
        self._inputs: Mapping[str, torch.Tensor] = {}

    # ---- state

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint, whose files are not needed after it: it is closed."""
        step = self.step
        tensors = {kind: held_rows(saved, step.weights) for kind, saved in checkpoint.tensors.items()}
        step.weights.load(tensors["weights"])
        step.ema.restore(tensors.get("ema", {}))
        numbers = checkpoint.scalars.get("optimiser")
        restore_optimiser(step.optimiser, step.weights.masters, tensors["optimiser"], numbers)
        if scaler := checkpoint.scalars.get("scaler"):
            step.scaler.load_state_dict(scaler)
        self.k = checkpoint.step
        self._best = Best.from_checkpoint(checkpoint, step.weights, self.run.path)
        for saved in checkpoint.tensors.values():
            saved.close()

    def save(self) -> None:
        """Save the state after step k; metrics up to it are on the disk before."""
        self._flush()
        if self.ranks.first:
            self.run.sync()
        step = self.step
        tensors: dict[str, Mapping[str, torch.Tensor]] = {
            "weights": step.weights.masters,
            "optimiser": optimiser_tensors(step.optimiser, step.weights.masters),
            "ema": step.averaged() if step.averages else {},
        }
        scalars = {
            "step": self.k,
            "recipe": self.recipe.model_dump(mode="json"),
            "environment": {**self.job.environment, "micro_batch": step.micro_batch},
            "store": dict(self.job.store),
            "micro_batch": step.micro_batch,
            "scaler": step.scaler.state_dict(),
            "optimiser": optimiser_numbers(step.optimiser, step.weights.masters),
            "measured": self._measure(),
        }
        if self._best is not None:
            tensors[BEST], scalars[BEST] = self._best.values, self._best.scalars
        with self.meter.part("checkpoint"):
            self.saver.save(self.k, tensors, scalars, step.weights.parts)
        self._save_bill()

    def _measure(self) -> dict[str, float]:
        if not self.job.calibration:
            return {}
        with self._evaluator.averaged():
            return self.task.measure(self.job.calibration)

    # ---- the loop

    def train(self) -> TrainResult:
        """Train to the end; Stopped where Ctrl-C or SIGTERM asks for it, with the state saved."""
        try:
            with self._watch.watching(), self._stop.listening():
                self._began_at, self._prior = self.k, self.meter.bill()
                self._save_bill()
                with _no_garbage_runs():
                    while not self._trained():
                        self._window = _Window()
                with self.meter.part("checkpoint"):
                    return self._finish()
        except OSError as error:
            if not is_disk_full(error):
                raise
            raise DarkroomError(
                f"the disk of '{self.run.path}' is full after step {self.k}; {self._kept()}; free space, "
                "and the same command goes on"
            ) from error
        finally:
            self.tracker.close()
            with suppress(CheckpointError, OSError):  # reported already, or irrelevant by now
                if not isinstance(sys.exception(), KeyboardInterrupt):  # a second request waits for nothing
                    self.saver.finish()
                self._save_bill()

    def _trained(self) -> bool:
        """Train to the end, or to where it must go back to a checkpoint."""
        try:
            with self.job.feed(self.k) as batches, self.meter.part("train"):
                self._train(batches)
        except _RollBack as back:
            self.saver.finish()
            _, found = newest([self.saver.place], self.say, self.ranks)
            if found is None:
                raise CheckpointError("the checkpoint to go back to is gone") from back
            self.restore(found)
            self.saver.place.forget()
            self.ranks.rank0_first(lambda: self.run.truncate(self.k))
            self._agreed.close()
            self.say(f"going on after step {self.k}, without the batches in {FILE}")
            return False
        return True

    def _train(self, batches: Iterator[Any]) -> None:
        steps, device = self.recipe.train.steps, self.job.device
        if self.k == 0 and (before := self._evaluate()):
            self._write({"step": 0, **before})
        self._ended = self._evaluator.standing(self.k)[1]  # a run that was killed at its early end
        self._evaluator.sample_if_missing(self.k)
        self._window = _Window()
        if self.k < steps and not self._ended:
            self._check_budget()
        while self.k < steps and not self._ended:
            started = time.perf_counter()
            self._watch.note(self.k, "data")
            with self.meter.part("wait"):
                columns = next(batches)
            waited_s = time.perf_counter() - started
            self._watch.note(self.k, "step")
            passes = self.k + 1 in self._guard.passed
            if passes:
                self.step.pass_over(self.k)
            else:
                self._inputs = self.task.inputs(columns, device)
                result = self._made_step()
            self.k += 1
            if not passes:
                self._window.results.append((self.k, result, waited_s))
            self._after_step()
        self._agreed.close()

    def _made_step(self) -> StepResult:
        before = self.step.micro_batch
        result = self.step(self.k, self._inputs)
        if self.step.micro_batch != before:
            self.say(
                f"micro-batch {self.step.micro_batch} from step {self.k + 1} on: {before} ran out of memory"
            )
        return result

    def _after_step(self) -> None:
        """Whatever is due after step k: write metrics, look, save, stop."""
        recipe, last = self.recipe, self.k == self.recipe.train.steps
        spent = self._spent()
        looks = last or _due(self.k, recipe.evaluate.every)
        draws = _due(self.k, recipe.sample.every) or (
            last and bool(recipe.sample.every or recipe.sample.prompts)
        )
        scores = recipe.evaluate.every_images and (last or self._evaluator.scores_due(self.k))
        if looks or draws or scores or _due(self.k, recipe.train.log_every):

            def seen() -> dict[str, Any]:
                return (self._evaluate() if looks else {}) | (self._evaluator.score(self.k) if scores else {})

            self._flush(seen)
            if draws:
                self._evaluator.sample(self.k)
        last = last or self._ended
        # Once: a signal between two looks at it must not leave without saving.
        stops = bool(self._agreed(int(self._stop.asked or bool(spent))))
        if last or stops or _due(self.k, recipe.checkpoint.every):
            self.save()
        if not self._window.results:
            self._window = _Window()
        if stops and not last:
            self.saver.finish()
            self._agreed.close()
            why = f"{spent} is spent: " if spent else ""
            go_on = "more budget" if spent else "the same command"
            raise Stopped(f"{why}stopped after step {self.k} of {recipe.train.steps}, saved; {go_on} goes on")

    def _spent(self) -> str:
        """What of the budget is used up; nothing is asked where there is none."""
        budget = self.recipe.budget
        if not self.ranks.first:
            return ""
        return budget.spent(self.meter.bill()) if budget.usd or budget.hours or budget.deadline else ""

    def _check_budget(self) -> None:
        if spent := self.ranks.broadcast(self._spent):
            raise Stopped(f"{spent} is spent, and {self.k} steps are made; say a larger one to go on")

    def _flush(self, more: Callable[[], dict[str, Any]] = dict) -> None:
        """Write the rows of the window; `more` is measured after its last step and stands in its row."""
        results = self._window.results
        if not results:
            return
        # One copy from the device for all steps: nothing waited for it until here.
        names = list(results[0][1].losses)
        measured = torch.stack([torch.stack([*r.losses.values(), r.grad_norm]) for _, r, _ in results])
        if self.ranks.size > 1:  # each has its share of the losses; the norm is the same for all
            measured[:, :-1] = self.ranks.summed(measured[:, :-1].contiguous())
        values = measured.tolist()
        elapsed_s = time.perf_counter() - self._window.started
        images = len(results) * self.recipe.train.global_batch
        rows = [
            {
                "step": step,
                **dict(zip(names, numbers, strict=False)),
                "lr": result.lr,
                "grad_norm": numbers[-1],
                "epoch": step * self.recipe.train.global_batch / self.job.rows,
                "images_per_s": images / elapsed_s,
                "data_wait_s": waited_s,
            }
            for (step, result, waited_s), numbers in zip(results, values, strict=True)
        ]
        self.meter.images += images
        self._window = _Window()
        self.saver.look()
        self._guard_losses(rows)
        looked = more()
        rows[-1] |= self._usage(rows[-1]["images_per_s"]) | looked
        gc.collect(1)
        self._write(*rows)
        if time.perf_counter() - self._billed > BILL_EVERY_S:
            self._save_bill()
        if _due(self.k, self.recipe.train.log_every) or looked or self.k == self.recipe.train.steps:
            self.say(self._line(rows[-1]))

    def _guard_losses(self, rows: list[dict[str, Any]]) -> None:
        """Stop, go back, or note the steps that were left out, where metrics are not what they should be."""
        settings, scaled = self.recipe.train, self.step.scaler.is_enabled()
        odd = [row for row in rows if _is_nonfinite(row, settings.spike_norm, scaled=scaled)]
        if not odd:
            return
        first, policy = odd[0], settings.nonfinite_policy
        name = "grad_norm" if math.isfinite(first["loss"]) else "loss"
        message = f"the {name} of step {first['step']} is {first[name]:.4g}"
        if policy == "skip":
            self._guard.write(odd, "skip", first=self.ranks.first)
            self.say(f"warning: {message}; {len(odd)} steps left out, their rows are in {FILE}")
            return
        self._write(*rows[: rows.index(first)])
        self.saver.finish()
        kept = self.ranks.broadcast(lambda: (found := self.saver.newest()) and found.step)
        if policy == "rollback" and kept is not None and self._guard.may_roll_back(kept):
            self._guard.write(odd[:1], "rollback", to=kept, first=self.ranks.first)
            self.say(f"warning: {message}; {self._kept()}")
            raise _RollBack
        self._guard.write(odd[:1], "stop", first=self.ranks.first)
        raise DarkroomError(
            f"{message}; {self._kept()}; its rows are in {FILE}; start a new run with a lower optim.lr (now "
            f"{self.recipe.optim.lr:g}), more optim.warmup_steps or train.precision=float32"
        )

    def _usage(self, images_per_s: float) -> dict[str, Any]:
        """How well the hardware is used; memory, dollars and kWh so far and at the end."""
        bill = self.meter.bill()
        found = projected(bill, self.k, self._began_at, self.recipe.train.steps, self._prior)
        trained_s = bill.wall_s - self._prior.wall_s
        if self._flops is None and trained_s > COUNT_AFTER_S and not self.ranks.sharded:
            self.step.weights.expect(last=False)
            with suppress(UncountedOperation):
                self._flops = flops_per_image(self.task, self._inputs)
            self._flops = self._flops or 0
        if self._flops:
            precision = self.job.environment["precision"]
            share = utilisation(self._flops, images_per_s, self.job.device, precision, bill.num_devices)
            found |= {} if share is None else {"mfu": share}
        return found

    def _kept(self) -> str:
        kept = self.saver.newest()
        return f"the checkpoint of step {kept.step} is kept" if kept else "no checkpoint was due yet"

    def _left_at_once(self) -> str:
        """What is said of a second request to stop; an address is not asked, which could take its time."""
        local = isinstance(self.saver.place, LocalPlace)
        kept = self._kept() if local else "the newest checkpoint that is there is whole"
        return f" after step {self.k}; {kept}, and the same command goes on"

    def _write(self, *rows: dict[str, Any]) -> None:
        if self.ranks.first:
            self.run.log(*rows)
            for row in rows:
                self.tracker.log(row["step"], row)
        self.last_row = rows[-1] if rows else self.last_row

    def _line(self, row: Mapping[str, Any]) -> str:
        steps = self.recipe.train.steps
        left_s = (steps - self.k) * self.recipe.train.global_batch / row["images_per_s"]
        bill = self.meter.bill()
        parts = [
            f"step {self.k:>{len(str(steps))}}/{steps}",
            f"loss {row['loss']:.4g}",
            *([f"held out {row['heldout_loss']:.4g}"] if "heldout_loss" in row else []),
            f"lr {row['lr']:.2e}",
            f"{row['images_per_s']:,.1f} images/s",
            *([f"MFU {100 * row['mfu']:.1f} %"] if "mfu" in row else []),
            f"{format_seconds(left_s)} left" if left_s else f"{format_seconds(bill.wall_s)} in all",
            *([self._cost(row)] if bill.usd is not None else []),
        ]
        return "  ".join(parts)

    def _cost(self, row: Mapping[str, Any]) -> str:
        so_far, end = row["usd"], row["usd_projected"]
        return format_usd(so_far) + (f" of {format_usd(end)}" if self.k < self.recipe.train.steps else "")

    # ---- looking

    def _evaluate(self) -> dict[str, Any]:
        found = self._evaluator.evaluate(self.k)
        if self.recipe.evaluate.patience is None or "heldout_loss" not in found:
            return found
        best_step, self._ended = self._evaluator.standing(self.k, found["heldout_loss"])
        if best_step == self.k:
            self._best = Best.of(self.k, self.step.averaged(), self._measure(), self.run.path)
        return found | ({} if self._best is None else {"best_step": self._best.step})

    # ---- the end

    def _finish(self) -> TrainResult:
        self.saver.finish()
        self._watch.note(self.k, "results")
        best = None if self.recipe.evaluate.patience is None else self._best
        measured = self._measure() if best is None else best.measured
        if best is not None:
            self.say(f"the results are the weights after step {best.step}, of the best held-out loss")
        if self.ranks.first:
            if self._ended:
                write_atomically(self.run.path / ENDED, json.dumps({"step": self.k}) + "\n", durable=True)
            self._write_results(best, measured)
        self._save_bill()
        self.ranks.barrier()
        return result_of(self.run)

    def _write_results(self, best: Best | None, measured: Mapping[str, float]) -> None:
        exporter = Exporter(self.recipe, self.run.path)
        if not self.ranks.sharded:
            values = self.step.averaged() if best is None else best.values
            self.step.release()  # a whole model needs memory of its own
            exporter.write_results(self.task.model, values, measured)
            return
        # No rank holds the whole model: the last checkpoint does.
        place = self.saver.place
        tensors = place.load(place.kept()[-1]).tensors
        values = tensors[BEST] if best is not None else tensors.get("ema") or tensors["weights"]
        exporter.write_whole_model(values, measured, self.run.model)

    def _save_bill(self) -> None:
        if not self.ranks.first:
            return
        self._billed = time.perf_counter()
        self.meter.bill().save(self.run.path / BILL)


def result_of(run: Run) -> TrainResult:
    """What a finished run came to."""
    rows = run.metrics()
    last = rows[-1] if rows else {}
    step = last.get("step", 0)
    written = last.get("best_step", step)
    return TrainResult(
        run=run.path,
        model=run.model,
        outputs=run.outputs,
        steps=step,
        results_step=written,
        loss=last.get("loss"),
        heldout_loss=next((row.get("heldout_loss") for row in rows if row["step"] == written), None),
        bill=run.bill() or Bill(),
    )


class _RollBack(Exception):
    """Training has to go on from the last checkpoint."""


@contextmanager
def _no_garbage_runs() -> Iterator[None]:
    """Within, Python looks for garbage only where it is asked to: its pauses come on all ranks at once.

    A process that had frozen its own objects before, so that each look is short, keeps them frozen.
    """
    was, had_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if not had_frozen:
            gc.unfreeze()
        if was:
            gc.enable()


def _due(k: int, every: int) -> bool:
    return every > 0 and k % every == 0


FILE = "odd_batches.jsonl"
MOST_ROLLBACKS = 10  # from one checkpoint: then it is not the batches


def _is_nonfinite(row: Mapping[str, Any], spike_norm: float | None, *, scaled: bool) -> bool:
    """Whether a step's row of metrics is odd. fp16 (`scaled`) leaves out those that overflow by itself."""
    if not math.isfinite(row["loss"]):
        return True
    if not math.isfinite(row["grad_norm"]):
        return not scaled
    return spike_norm is not None and row["grad_norm"] > spike_norm


class NonfiniteGuard:
    """The odd batches of a run, and the steps that are passed over since."""

    def __init__(
        self, run: Path, rows_of: Callable[[int], Sequence[int]] | None, ranks: Ranks = ALONE
    ) -> None:
        self._file, self._rows_of = run / FILE, rows_of
        self.passed: set[int] = set()
        self._rollbacks: dict[int, int] = {}
        for line in ranks.broadcast(self._noted):  # other machines need not see the run's folder
            row = json.loads(line)
            if row["done"] == "rollback":
                self._note(row["step"], row["to"])

    def _noted(self) -> list[str]:
        return self._file.read_text(encoding="utf-8").splitlines() if self._file.exists() else []

    def _note(self, step: int, to: int) -> None:
        self.passed.add(step)
        self._rollbacks[to] = self._rollbacks.get(to, 0) + 1

    def may_roll_back(self, to: int) -> bool:
        """Whether going back to this step's checkpoint once more is worth it."""
        return self._rollbacks.get(to, 0) < MOST_ROLLBACKS

    def write(self, rows: Iterable[Mapping[str, Any]], done: str, *, to: int = 0, first: bool = True) -> None:
        """Note odd steps and what was done; rank 0 (`first`) writes it down."""
        lines = []
        for row in rows:
            step = row["step"]
            if done == "rollback":
                self._note(step, to)
            ids = [] if self._rows_of is None else list(self._rows_of(step - 1))
            values = {"step": step, "loss": str(row["loss"]), "grad_norm": str(row["grad_norm"])}
            lines.append(json.dumps({**values, "done": done, "to": to, "rows": ids}) + "\n")
        if first:
            with self._file.open("a", encoding="utf-8") as file:
                file.write("".join(lines))
