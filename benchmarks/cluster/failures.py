"""What machines that fail cost a long job: simulated, from a seed, with every assumption an argument.

    python benchmarks/cluster/failures.py --out benchmarks/cluster/failures.csv

The job is the SD 2 schedule (1,126,400,000 pictures at 256 px, 1,740,800,000 at 512 px) at Anyscale's
published 13,165 A100-hours, spread over 8, 64 or 512 GPUs in machines of 8 without loss. A machine fails
after a time drawn from an exponential distribution. What was learnt since the last durable checkpoint is
lost, starting again takes its time, and what happens until the machine is replaced is the strategy:

wait       the job stands still until a machine is there
elastic    it goes on with as many of the rest as share the global batch evenly
spare      one machine more than needed is paid for, and takes the place at once

Failure rates are published ones of other jobs, as one failure in so many GPU-hours: 50,675 (Llama 3: 419
unplanned interruptions in 54 days of 16,384 GPUs), 8,090 (a mean time to failure of 7.9 h at 1,024 GPUs).
The third, 800, is an assumption: spot machines of 8 GPUs taken away once in 100 h each.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
from pydantic import BaseModel, Field

from darkroom.run import append_rows

GPU_HOURS = 13_165.0
PICTURES = 1_126_400_000 + 1_740_800_000
PER_MACHINE = 8
RATES = {"llama-3": 50_675.0, "1024-gpus": 8_090.0, "spot-assumed": 800.0}
STRATEGIES = ("wait", "elastic", "spare")


class Assumed(BaseModel):
    """What the simulation takes for granted; seconds unless said."""

    gpu_hours: float = Field(GPU_HOURS, description="of work without a failure")
    checkpoint_every_s: float = Field(600, description="seconds of training between checkpoints")
    checkpoint_stall_s: float = Field(3, description="training stands still while state is copied")
    checkpoint_write_s: float = Field(60, description="until a checkpoint is durable, beside training")
    detect_s: float = Field(30, description="until a silent machine counts as gone")
    start_s: float = Field(120, description="new workers, model and state read, first step")
    replace_s: float = Field(600, description="until another machine is there, in the mean")
    pause_s: float = Field(60, description="a planned pause: saving and starting again, nothing lost")
    global_batch: int = Field(4096, description="elastic: GPUs must divide it")


class Finding(BaseModel):
    """A row: one size, rate and strategy."""

    gpus: int
    rate: str
    gpu_hours_per_failure: float
    strategy: str
    global_batch: int
    checkpoint_every_s: float
    young_interval_s: float = Field(description="sqrt(2 * stall * time between failures), Young 1974")
    ideal_h: float
    failures: float = Field(description="mean over the draws")
    wall_h: float = Field(description="median")
    wall_p90_h: float
    lost_h: float = Field(description="median of wall less ideal hours")
    lost_share: float = Field(description="lost hours of all")
    paid_gpu_hours: float = Field(description="median; machines in use or standing still, spare included")
    draws: int
    seed: int


def most_that_divide(machines: int, global_batch: int) -> int:
    """The most machines, of those there are, whose GPUs share the batch evenly."""
    return max((m for m in range(1, machines + 1) if global_batch % (m * PER_MACHINE) == 0), default=0)


def simulate(
    machines: int, hours_per_failure: float, strategy: str, given: Assumed, draws: np.random.Generator
) -> tuple[float, int, float]:
    """Wall hours, failures and GPU-hours paid of one job; `hours_per_failure` are GPU-hours."""
    h = 3600.0
    work, wall, failures, paid = given.gpu_hours, 0.0, 0, 0.0  # work in GPU-hours of training left
    machine_rate = PER_MACHINE / hours_per_failure  # failures an hour of each machine
    back: list[float] = []  # when machines that failed are replaced
    spare = 1 if strategy == "spare" else 0
    slowed = 1 + given.checkpoint_stall_s / given.checkpoint_every_s
    interval, durable = given.checkpoint_every_s / h, given.checkpoint_write_s / h
    while work > 1e-9:
        back = [at for at in back if at > wall]
        there = machines + spare - len(back)
        used = (
            most_that_divide(min(there, machines), given.global_batch) if strategy == "elastic" else machines
        )
        if there < used or used == 0:
            until = min(back)
            paid += there * PER_MACHINE * (until - wall)
            wall = until
            continue
        speed = used * PER_MACHINE / slowed
        ends, fails = work / speed, draws.exponential(1 / (there * machine_rate))
        grows = min(back) - wall if back else math.inf
        passed = min(ends, fails, grows)
        work -= passed * speed
        wall, paid = wall + passed, paid + passed * there * PER_MACHINE
        stands = 0.0
        if passed == fails:
            failures += 1
            back.append(wall + draws.exponential(given.replace_s / h))
            if draws.random() < used / there:  # one of those at work, not the spare one
                work += min(passed, draws.uniform(0, interval) + durable) * speed
                stands = (given.detect_s + given.start_s) / h
        elif passed == grows and strategy == "elastic":
            more = most_that_divide(min(there + 1, machines), given.global_batch) > used
            stands = given.pause_s / h if more else 0.0
        wall, paid = wall + stands, paid + stands * there * PER_MACHINE
    return wall, failures, paid


def finding(gpus: int, rate: str, strategy: str, given: Assumed, draws: int, seed: int) -> Finding:
    """Many jobs of one kind."""
    machines, per_failure = gpus // PER_MACHINE, RATES[rate]
    number = [gpus, list(RATES).index(rate), STRATEGIES.index(strategy), given.global_batch]
    generator = np.random.default_rng([seed, *number])
    jobs = [simulate(machines, per_failure, strategy, given, generator) for _ in range(draws)]
    walls, failures, paid = (np.array(column) for column in zip(*jobs, strict=True))
    ideal, wall = given.gpu_hours / gpus, float(np.median(walls))
    return Finding(
        gpus=gpus,
        rate=rate,
        gpu_hours_per_failure=per_failure,
        strategy=strategy,
        global_batch=given.global_batch,
        checkpoint_every_s=given.checkpoint_every_s,
        young_interval_s=math.sqrt(2 * given.checkpoint_stall_s * per_failure / gpus * 3600),
        ideal_h=ideal,
        failures=float(failures.mean()),
        wall_h=wall,
        wall_p90_h=float(np.quantile(walls, 0.9)),
        lost_h=wall - ideal,
        lost_share=(wall - ideal) / wall,
        paid_gpu_hours=float(np.median(paid)),
        draws=draws,
        seed=seed,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, field in Assumed.model_fields.items():
        parser.add_argument(
            "--" + name.replace("_", "-"),
            type=type(field.default),
            default=field.default,
            help=f"{field.description} ({field.default:g})",
        )
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    given = Assumed(**{name: getattr(asked, name) for name in Assumed.model_fields})
    even = given.model_copy(update={"global_batch": 4032})  # 63 * 64: also 63 machines share it evenly
    cases = [(strategy, given) for strategy in STRATEGIES] + [("elastic", even)]
    for gpus in asked.gpus:
        for rate in RATES:
            for strategy, settings in cases:
                row = finding(gpus, rate, strategy, settings, asked.draws, asked.seed)
                print(
                    f"{gpus} GPUs, {rate}, {strategy} ({row.global_batch}): {row.failures:.1f} failures, "
                    f"{row.lost_h:.2f} h lost of {row.wall_h:.1f} ({100 * row.lost_share:.1f} %)"
                )
                if asked.out:
                    append_rows(asked.out, Finding, [row], digits=4)


if __name__ == "__main__":
    main()
