"""Kill a server again and again and see that no accepted job is lost, doubled or drawn differently.

    python benchmarks/serve_kills.py MODEL --rounds 50 --out serve_kills.json
    python benchmarks/serve_kills.py MODEL --rounds 1000 --work kills/ --minutes 30   # until done
    python benchmarks/serve_kills.py MODEL --rounds 20 --database    # PostgreSQL is killed, too
    python benchmarks/serve_kills.py MODEL --rounds 20 --clock       # each server's clock is another

Each round starts `darkroom serve` on the same state folder, has it accept a few small jobs (some of them
sent twice), and kills it with SIGKILL after a random while: in loading, in the midst of steps, while
storing. Then one last server finishes everything, undisturbed. With `--database` the jobs are kept by a
PostgreSQL of its own (Debian's postgresql), which is stopped without a warning while jobs are sent, and
started again: the server has to take jobs again by itself. With `--clock` the server of each round has a
clock up to an hour before or behind (Debian's faketime). Each job must be there once, done, with one
picture, equal within 1/255 to that of a server that was never killed, on a state folder of its own. Exit
code 1 otherwise.

With `--work` the rounds may be made in several goes: the folder keeps the state and what was accepted
(`rounds.json`), and a go that ends before the last round, by `--minutes` or a kill of its own, exits with 3.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from darkroom.errors import DarkroomError
from darkroom.measure.serving import Client, ServerProcess

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from own_postgres import OwnPostgres

JOBS_A_ROUND = 3
HOUR_S = 3600
OPTIONS = ("--rate", "1000000", "--queue", "100000")
FINAL = ("done", "failed", "cancelled")


def body(number: int, draw: random.Random) -> dict[str, Any]:
    """A small job; its seed is its number, its guidance on or off."""
    steps, guidance = draw.choice([2, 5, 12]), draw.choice([1.0, 7.5])
    return {"prompt": f"picture {number}", "steps": steps, "guidance": guidance, "seed": number}


@contextmanager
def other_clock(step_s: int | None) -> Iterator[None]:
    """What starts meanwhile has a clock that is so many seconds ahead; None: its own."""
    if step_s is None:
        yield
        return
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    if not found:
        raise SystemExit("no faketime here: apt-get install faketime")
    named = {"LD_PRELOAD": str(found[0]), "FAKETIME": f"{step_s:+d}s", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    os.environ.update(named)
    try:
        yield
    finally:
        for name in named:
            del os.environ[name]


async def restart(database: OwnPostgres, draw: random.Random) -> None:
    """A database that dies, and is back after up to two seconds."""
    await asyncio.sleep(draw.uniform(0, 0.3))
    await asyncio.to_thread(database.stop)
    await asyncio.sleep(draw.uniform(0, 2))
    await asyncio.to_thread(database.start)


async def one_round(
    server: ServerProcess,
    first: int,
    draw: random.Random,
    accepted: dict[str, dict[str, Any]],
    database: OwnPostgres | None = None,
) -> bool:
    """Send jobs until the kill; what was answered with 202 counts as accepted. Whether it got that far."""
    client = Client(server.port)
    early = draw.random() < 0.1  # while it loads
    try:
        if early:
            await asyncio.sleep(draw.uniform(0, 1))
            return False
        await server.ready(client)
        away = None if database is None else asyncio.create_task(restart(database, draw))
        jobs = {f"job{first + i}": body(first + i, draw) for i in range(JOBS_A_ROUND)}
        for name, wanted in jobs.items():
            for _ in range(draw.choice([1, 1, 2])):
                status, _ = await client.ask("PUT", f"/jobs/{name}", wanted)
                if status == 202:
                    accepted[name] = wanted
        if away is not None:
            await away
            await taken_again(client, jobs)
            accepted |= jobs
        await asyncio.sleep(draw.uniform(0, 0.5))
        return True
    finally:
        server.kill()
        client.close()


async def taken_again(client: Client, jobs: dict[str, dict[str, Any]]) -> None:
    """The same server takes the jobs of a round in the end; those that it has already it has once."""
    end = time.monotonic() + 30
    for name, wanted in jobs.items():
        while (status := (await client.ask("PUT", f"/jobs/{name}", wanted))[0]) not in (200, 202):
            if time.monotonic() > end:
                raise DarkroomError(f"the server takes no jobs again: {status}")
            await asyncio.sleep(0.1)


async def ended(server: ServerProcess, names: list[str], limit_s: float) -> dict[str, dict[str, Any] | None]:
    """Every job at its end, with its picture's bytes under `png`; None for one that is not there."""
    client = Client(server.port)
    await server.ready(client)
    found: dict[str, dict[str, Any] | None] = {}
    end = time.monotonic() + limit_s
    for name in names:
        while True:
            status, job = await client.json("GET", f"/jobs/{name}?wait_s=10")
            if status == 404 or job.get("state") in FINAL or time.monotonic() > end:
                break
        found[name] = job if status == 200 else None
        if status == 200 and job["state"] == "done":
            found[name]["png"] = (await client.ask("GET", f"/jobs/{name}/pictures/0"))[1]
    client.close()
    return found


async def all_ids(client: Client) -> list[str]:
    """The ids of all jobs there are, page by page."""
    ids: list[str] = []
    before = ""
    while True:
        _, listed = await client.json("GET", f"/jobs?limit=1000{before}")
        if not listed["jobs"]:
            return ids
        ids += [job["id"] for job in listed["jobs"]]
        before = f"&before={listed['jobs'][-1]['created_s']!r}"


def difference(one: bytes, other: bytes) -> int:
    """The largest difference of any value of any pixel, in 1/255."""
    a, b = (np.asarray(Image.open(io.BytesIO(png))).astype(int) for png in (one, other))
    return int(np.abs(a - b).max())


async def undisturbed(model: str, state: Path, jobs: dict[str, dict[str, Any]]) -> Any:
    """The same jobs through a server that is never killed."""
    with ServerProcess(model, state, *OPTIONS) as server:
        client = Client(server.port)
        await server.ready(client)
        for name, wanted in jobs.items():
            await client.ask("PUT", f"/jobs/{name}", wanted)
        client.close()
        return await ended(server, list(jobs), 600)


@dataclass
class Rounds:
    """What was done so far, kept in a file after each round."""

    done: int = 0
    reached: int = 0
    """Those in which jobs were sent."""
    wall_s: float = 0.0
    accepted: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Rounds:
        """From the file, if there is one."""
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    def write(self, path: Path) -> None:
        """In place of the last, whole or not at all."""
        beside = path.with_suffix(".part")
        beside.write_text(json.dumps(asdict(self)))
        os.replace(beside, path)


async def make_rounds(
    given: argparse.Namespace, work: Path, options: tuple[str, ...], database: OwnPostgres | None
) -> Rounds:
    """Rounds until there are as many as wanted, or the time is over."""
    wanted, seed, minutes = given.rounds, given.seed, given.minutes
    kept = work / "rounds.json"
    rounds, start = Rounds.read(kept), time.monotonic()
    while rounds.done < wanted and time.monotonic() - start < minutes * 60:
        began = time.monotonic()
        draw = random.Random(f"{seed}/{rounds.done}")
        with other_clock(draw.randint(-HOUR_S, HOUR_S) if given.clock else None):
            server = ServerProcess(given.model, work / "state", *options)
        first = rounds.done * JOBS_A_ROUND
        rounds.reached += await one_round(server, first, draw, rounds.accepted, database)
        rounds.done += 1
        rounds.wall_s += time.monotonic() - began
        rounds.write(kept)
        print(f"round {rounds.done} of {wanted}: {len(rounds.accepted)} jobs accepted", file=sys.stderr)
    return rounds


async def judged(model: str, rounds: Rounds, work: Path, options: tuple[str, ...]) -> dict[str, Any]:
    """What all rounds came to."""
    accepted, start = rounds.accepted, time.monotonic()
    with ServerProcess(model, work / "state", *options) as server:
        after = await ended(server, list(accepted), 600)
        client = Client(server.port)
        ids = await all_ids(client)
        client.close()
    lone = await undisturbed(model, work / "undisturbed", accepted)
    done = [name for name, job in after.items() if job is not None and job["state"] == "done"]
    files = list((work / "state" / "pictures").glob("*/*/*.png"))
    apart = {name: difference(after[name]["png"], lone[name]["png"]) for name in done}
    control = difference(after[done[0]]["png"], after[done[1]]["png"]) if len(done) > 1 else 0
    return {
        "rounds": rounds.done,
        "killed_while_loading": rounds.done - rounds.reached,
        "accepted": len(accepted),
        "done": len(done),
        "lost": sum(job is None for job in after.values()),
        "doubled": len(ids) - len(set(ids)) + max(0, len(files) - len(done)),
        "unknown": len(set(ids) - accepted.keys()),
        "most_apart_255": max(apart.values(), default=0),
        "two_jobs_apart_255": control,
        "wall_s": round(rounds.wall_s + time.monotonic() - start, 1),
    }


def main() -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a model folder, a hub id, or a family")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="a folder to go on in")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="of rounds in this go")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--database", action="store_true", help="restart PostgreSQL in each round; no --work")
    parser.add_argument("--clock", action="store_true", help="another clock in each round")
    given = parser.parse_args()
    if given.database and given.work is not None:
        parser.error("--database keeps nothing for another go: without --work")
    with tempfile.TemporaryDirectory(prefix="darkroom-kills-") as fresh, ExitStack() as stack:
        work = given.work or Path(fresh)
        work.mkdir(parents=True, exist_ok=True)
        database, options = None, OPTIONS
        if given.database:
            database = stack.enter_context(OwnPostgres(Path(f"/tmp/darkroom-pg-kills-{os.getpid()}")))
            options = (*OPTIONS, "--jobs", database.url)
        rounds = asyncio.run(make_rounds(given, work, options, database))
        if rounds.done < given.rounds:
            print(f"{rounds.done} of {given.rounds} rounds; the same command goes on", file=sys.stderr)
            sys.exit(3)
        told = asyncio.run(judged(given.model, rounds, work, options))
    text = json.dumps(told, indent=2)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")
    good = told["accepted"] == told["done"] > 0 and not told["doubled"] and told["most_apart_255"] <= 1
    sys.exit(0 if good and told["two_jobs_apart_255"] >= 10 else 1)


if __name__ == "__main__":
    main()
