"""An import that is killed or stopped at any moment goes on with the same call, without doubles or gaps."""

from __future__ import annotations

import io
import json
import random
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from material import encoded, noise_picture

import warm
from darkroom.data import verify
from darkroom.data.importers.job import import_pictures
from darkroom.data.store import Store

NUM = 1200
CHILD = """
import sys
from darkroom.data.importers.job import import_pictures
from darkroom.errors import Stopped
def tell(done, total):
    print(done, flush=True)
try:
    report = import_pictures(sys.argv[1], sys.argv[2], rows_per_fragment=64, progress=tell)
except Stopped as stop:
    print("stopped:", stop, flush=True)
    sys.exit(1)
print("added", report.added, flush=True)
"""


@pytest.fixture(scope="module")
def tars(tmp_path_factory) -> Path:
    """Webdataset tars with a broken picture here and there, and one double."""
    folder = tmp_path_factory.mktemp("tars")
    for part in range(6):
        with tarfile.open(folder / f"{part:05d}.tar", "w") as archive:
            for number in range(part * NUM // 6, (part + 1) * NUM // 6):
                data = encoded(noise_picture(number % (NUM - 1), (96, 96)))
                for name, content in (
                    (f"{number:06d}.png", data[:100] if number % 100 == 7 else data),
                    (f"{number:06d}.json", json.dumps({"caption": "a picture", "n": number}).encode()),
                ):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    return folder


def start(source: Path, store: Path) -> warm.Popen:
    command = [sys.executable, "-c", CHILD, str(source), str(store)]
    return warm.Popen(command, stdout=warm.PIPE, stderr=warm.PIPE, text=True)


def numbers_in(store: Path) -> list[int]:
    opened = Store.open(store)
    return opened.take(opened.select(None), ["n"])["n"].to_pylist()


EXPECTED = [n for n in range(NUM - 1) if n % 100 != 7]


def check_whole(store: Path) -> None:
    assert numbers_in(store) == EXPECTED
    lines = [json.loads(line) for line in (store / "rejected.jsonl").read_text().splitlines()]
    assert len(lines) == len({line["key"] for line in lines}) == NUM // 100


@pytest.mark.nightly
def test_killed_at_random_moments(tars, tmp_path):
    store, chance, kills = tmp_path / "s.lance", random.Random(0), 0
    for _ in range(60):
        child = start(tars, store)
        assert child.stdout is not None
        child.stdout.readline()  # it is at work
        time.sleep(chance.uniform(0, 0.12))
        child.send_signal(signal.SIGKILL)
        rest = child.communicate()[0]
        kills += "added" not in rest
        if (store / "_versions").is_dir():
            have = numbers_in(store) if "n" in Store.open(store).columns() else []
            assert have == EXPECTED[: len(have)], "what is there is a whole beginning of the source"
        if kills >= 8 or "added" in rest:
            break
    assert kills >= 3
    report = import_pictures(tars, store)
    assert report.num_rows == len(EXPECTED)
    check_whole(store)
    assert import_pictures(tars, store).added == 0


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop_it_commits_what_it_has(tars, tmp_path, number):
    store = tmp_path / "s.lance"
    child = start(tars, store)
    assert child.stdout is not None
    child.stdout.readline()
    child.send_signal(number)
    out, err = child.communicate(timeout=30)
    assert child.returncode == 1, err
    assert "stopped: stopped with" in out
    assert "the same command goes on" in out
    had = len(numbers_in(store))
    assert 0 < had < len(EXPECTED)
    assert f"stopped with {had:,} pictures added" in out
    report = import_pictures(tars, store)
    assert report.added == len(EXPECTED) - had
    check_whole(store)


STUCK = """
import sys, time
from darkroom.cli import main
from darkroom.data.importers import job
from darkroom.data.store import Store
job.TABLE_ROWS, job.COMMIT_EVERY_S = 64, 0
append = Store.append
def append_once(self, rows):
    if self.num_rows:
        print("committing", flush=True)
        time.sleep(600)
    append(self, rows)
Store.append = append_once
main(["import", *sys.argv[1:]])
"""


def test_a_second_ctrl_c_waits_for_no_commit(tars, tmp_path):
    """What was committed before is whole, and the same command goes on from there."""
    store = tmp_path / "s.lance"
    command = [sys.executable, "-c", STUCK, str(tars), str(store)]
    with warm.Popen(command, stdout=warm.PIPE, stderr=warm.PIPE, text=True) as child:
        assert child.stdout is not None
        while "committing" not in (line := child.stdout.readline()):
            assert line
        child.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(1)
        child.send_signal(signal.SIGTERM)
        said = child.communicate(timeout=30)[1]
    assert child.returncode == 1
    assert said.endswith(
        "darkroom: stopped at once; what was committed is whole, and the same command goes on\n"
    )
    had = numbers_in(store)
    assert had == EXPECTED[: len(had)]
    assert 0 < len(had) < len(EXPECTED)
    assert import_pictures(tars, store).added == len(EXPECTED) - len(had)
    check_whole(store)


def test_parts_that_are_read_are_not_read_again(tars, tmp_path):
    """A part counts as read only for the same settings, and while it is the same file."""
    store = tmp_path / "s.lance"
    first = import_pictures(tars, store)
    assert (first.added, first.doubles, first.rejected) == (len(EXPECTED), 1, {"undecodable": NUM // 100})
    again = import_pictures(tars, store)
    assert (again.added, again.doubles, again.rejected) == (0, len(EXPECTED) + 1, first.rejected)
    assert again.wall_s < first.wall_s
    other = import_pictures(tars, store, max_pixels=1_000_000)
    assert (other.added, other.doubles) == (0, len(EXPECTED) + 1)
    check_whole(store)
    (tars / "00003.tar").touch()
    assert import_pictures(tars, store).doubles == len(EXPECTED) + 1
    Store.open(store).delete(source=tars.name)
    assert import_pictures(tars, store).added == len(EXPECTED)


KILLED = """
import os, signal, sys
from darkroom.data.store import Store
from darkroom.data.importers.job import import_pictures
from darkroom.data.importers import job as importers
importers.TABLE_ROWS = int(sys.argv[4])
importers.COMMIT_EVERY_S = float(sys.argv[5])
append, left = Store.append, [int(sys.argv[3])]
def killed(store, rows):
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    return append(store, rows)
Store.append = killed
import_pictures(sys.argv[1], sys.argv[2], rows_per_fragment=64)
"""


def killed_after(commits: int, source: Path, store: Path, *, table_rows: int, commit_every_s: float) -> None:
    arguments = [str(source), str(store), str(commits), str(table_rows), str(commit_every_s)]
    assert warm.run([sys.executable, "-c", KILLED, *arguments]).returncode == -9


def test_a_part_counts_as_read_when_all_of_it_is_committed(tars, tmp_path):
    """A table of many parts is written in several fragments; a kill between them leaves no gap."""
    store = tmp_path / "s.lance"
    killed_after(3, tars, store, table_rows=1024, commit_every_s=1e9)
    assert numbers_in(store) == EXPECTED[: 3 * 64]
    import_pictures(tars, store)
    check_whole(store)


def boundaries(store: Path) -> list[int]:
    return [fragment.num_rows for fragment in Store.open(store).fragments]


def test_commits_on_the_way_are_joined_and_a_kill_changes_no_boundary(tars, tmp_path, monkeypatch):
    plain, killed = tmp_path / "plain.lance", tmp_path / "killed.lance"
    import_pictures(tars, plain, rows_per_fragment=64)
    monkeypatch.setattr("darkroom.data.importers.job.TABLE_ROWS", 24)
    killed_after(11, tars, killed, table_rows=24, commit_every_s=0)
    store = Store.open(killed)
    had = numbers_in(killed)
    assert 64 < len(had) < 64 * 11
    assert had == EXPECTED[: len(had)]
    assert boundaries(killed)[0] == 64, "a whole group was joined"
    assert len(boundaries(killed)) > 2, "the next was not"
    pinned, before = store.pin("a-run"), boundaries(killed)
    monkeypatch.setattr("darkroom.data.importers.job.COMMIT_EVERY_S", 0)
    report = import_pictures(tars, killed, rows_per_fragment=64)
    assert report.added == len(EXPECTED) - len(had)
    check_whole(killed)
    assert boundaries(killed) == boundaries(plain) == [64] * 18 + [len(EXPECTED) - 64 * 18]
    assert verify(killed).problems == []
    at_pin = Store.open(killed, version=pinned)
    assert [fragment.num_rows for fragment in at_pin.fragments] == before, "what a run reads stays"
    assert at_pin.take(range(len(had)), ["n"])["n"].to_pylist() == had
