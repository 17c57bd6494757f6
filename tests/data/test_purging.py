"""Deleting for good: wherever it is killed, the bytes leave the disk with the same call or the next write."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import lance
import pyarrow as pa
import pytest
from material import encoded, noise_picture, rows
from typer.testing import CliRunner

import warm
from darkroom.cli.application import app
from darkroom.data import sidecars, verify
from darkroom.data.importers.job import import_pictures, picture_id
from darkroom.data.store import Store
from darkroom.data.versions import writing
from darkroom.errors import StoreError

sys.path.insert(0, str(Path(__file__).parents[1]))
from needs import missing

LATENTS = pa.field(
    "latents_64_ab",
    pa.struct([pa.field("moments", pa.large_binary(), metadata={"lance-encoding:compression": "none"})]),
    metadata={"darkroom.kind": "latents"},
)


def rows_of(source: str, start: int, num: int) -> pa.Table:
    """Rows whose bytes name their source, with the ids that an import gives them."""
    pictures = [f"<picture {source} {i}>".encode() for i in range(start, start + num)]
    captions = [f"{source} {i}" for i in range(start, start + num)]
    table = rows(num, start, source=source)
    for name, values in (
        ("id", [picture_id(p, c) for p, c in zip(pictures, captions, strict=True)]),
        ("picture", pictures),
        ("caption", captions),
    ):
        at = table.schema.get_field_index(name)
        table = table.set_column(
            at, table.schema.field(name), pa.array(values, table.schema.field(name).type)
        )
    return table


def make_store(path: Path) -> Path:
    """A fragment with pictures of A and B, one of B, one of A; latents in the first two; what a killed
    prepare left of the first."""
    store = Store.create(path)
    store.append(pa.concat_tables([rows_of("A", 0, 5), rows_of("B", 5, 5)]))
    store.append(rows_of("B", 10, 5))
    store.append(rows_of("A", 15, 5))
    store.add_columns([LATENTS])
    for info in store.fragments[:2]:
        fragment = store.dataset.get_fragment(info.id)
        table = fragment.to_table(columns=["id", "source", "key"])
        values = [
            {"moments": f"<latents {s} {k}>".encode() * 8}
            for s, k in zip(table["source"].to_pylist(), table["key"].to_pylist(), strict=True)
        ]
        updated = pa.table({"id": table["id"], LATENTS.name: pa.array(values, LATENTS.type)})
        metadata, fields = fragment.update_columns(updated, "id", "id")
        operation = lance.LanceOperation.Update(updated_fragments=[metadata], fields_modified=fields)
        store.commit(
            lambda o=operation: lance.LanceDataset.commit(store.dataset, o, read_version=store.version)
        )
    folder = path / "_prepare" / "text_ab"
    folder.mkdir(parents=True)
    first, second = (store.dataset.get_fragment(f.id).data_files()[0].path for f in store.fragments[:2])
    for number, (base, content) in enumerate(((first, "<states A>"), (second, "<states B>"))):
        (folder / f"text-{number}.lance").write_text(content)
        noted = {"fragment": number, "physical_rows": 5, "base": base, "file": f"text-{number}.lance"}
        (folder / f"{number}.json").write_text(json.dumps({**noted, "rows": 5, "unreadable": []}))
    store.drop_old_versions()
    return path


def found_on_disk(store: Path, text: str) -> bool:
    return subprocess.run(["grep", "-rqaF", text, str(store)], check=False).returncode == 0


OF_A = ("<picture A", "<latents A", "<states A")
OF_B = ("<picture B", "<latents B", "<states B")


def check_gone(store: Path) -> None:
    """All of A is off the disk, all of B is there, and nothing is wrong."""
    assert [text for text in OF_A if found_on_disk(store, text)] == []
    assert [text for text in OF_B if not found_on_disk(store, text)] == []
    assert Store.open(store).sources()["B"] >= 10
    found = verify(store)
    assert found.problems == []
    assert found.hashed == found.rows >= 10
    assert taken_down(store) == {"A": 10}


def taken_down(store: Path) -> dict[str | None, int]:
    """What `verify` says was deleted, all days together."""
    counts: Counter[str | None] = Counter()
    for one in verify(store).takedowns:
        counts[one["source"]] += one["pictures"]
    return dict(counts)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    store = make_store(tmp_path_factory.mktemp("made") / "s.lance")
    assert all(found_on_disk(store, text) for text in OF_A + OF_B), "the control: all of it is on the disk"
    assert verify(store).problems == []
    return store


@pytest.fixture
def path(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "s.lance"))


def test_all_that_was_made_of_a_picture_leaves_the_disk(path):
    deleted = Store.open(path).delete(source="A")
    assert deleted.rows == 10
    assert deleted.purged.bytes > 0
    check_gone(path)
    with pytest.raises(StoreError, match="no source 'A'; allowed: B"):
        Store.open(path).delete(source="A")


def test_verify_shows_what_was_deleted_on_which_day(path, monkeypatch):
    assert verify(path).takedowns == [], "the control: nothing was deleted"
    before = f"{datetime.now(UTC):%Y-%m-%d}"
    ids = [picture_id(f"<picture {s} {i}>".encode(), f"{s} {i}") for s, i in (("A", 0), ("A", 1), ("B", 5))]
    Store.open(path).delete(ids=ids)
    Store.open(path).delete(ids=ids)  # again: nothing more is gone
    days = {before, f"{datetime.now(UTC):%Y-%m-%d}"}
    found = verify(path)
    assert {one["day"] for one in found.takedowns} <= days
    assert taken_down(path) == {"A": 2, "B": 1}

    class Later(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(days=400)

    monkeypatch.setattr(sidecars, "datetime", Later)
    Store.open(path).delete(source="A")
    assert taken_down(path) == {"A": 10, "B": 1}
    *_, last = verify(path).takedowns
    assert (last["source"], last["pictures"], last["day"] in days) == ("A", 8, False)
    kept = "".join(file.read_text() for file in (path / "_takedowns").iterdir())
    assert not [text for text in (*ids, "<picture", "A 0") if text in kept]
    result = CliRunner().invoke(app, ["verify", str(path)])
    assert result.exit_code == 0
    assert f"deleted on {last['day']} of 'A': 8 pictures" in result.output
    told = json.loads(CliRunner().invoke(app, ["verify", str(path), "--json"]).output)
    assert told["takedowns"] == verify(path).takedowns


def test_what_was_deleted_before_days_were_noted_is_counted(path):
    ids = [picture_id(f"<picture B {i}>".encode(), f"B {i}") for i in (5, 6)]
    Store.open(path).delete(ids=ids[:1])
    shutil.rmtree(path / "_takedowns")
    Store.open(path).delete(ids=ids[1:])
    unknown, noted = verify(path).takedowns
    assert unknown == {"day": None, "source": None, "pictures": 1}
    assert (noted["source"], noted["pictures"]) == ("B", 1)
    assert "deleted before days were noted: 1 pictures" in verify(path).lines()


def test_a_damaged_note_of_a_deletion_is_named(path):
    Store.open(path).delete(source="A")
    (note,) = (f for f in (path / "_takedowns").iterdir() if f.name != "before.json")
    note.write_text('{"day": 3}')
    assert [p for p in verify(path).problems if note.name in p and "damaged" in p]
    Store.open(path).append(rows_of("B", 20, 1))  # which needs no note of what is done


KILLED_NOTING = """
import os, signal, sys
from darkroom.data.store import Store
from darkroom.data.sidecars import Takedowns
def killed(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
store, of, where = Store.open(sys.argv[1]), sys.argv[2], sys.argv[3]
if where == "half":
    whole, Store._delete_where, calls = Store._delete_where, None, []
    def one(*words):
        calls.append(1)
        return whole(*words) if len(calls) == 1 else killed()
    import darkroom.data.store as module
    module.IDS_PER_DELETE = 4
    Store._delete_where = one
elif where == "finish":
    Takedowns.finish = killed
elif where == "removal":
    from darkroom.data import sidecars
    sidecars.remove_file = killed
else:
    setattr(Store, where, killed)
ids = [i for b in store.scan(["id"], filter="source = 'A'") for i in b.column("id").to_pylist()]
store.delete(**({"ids": ids} if of == "ids" else {"source": "A"}))
"""


@pytest.mark.parametrize(
    ("of", "where", "gone"),
    [
        ("source", "_delete_where", 0),
        ("source", "finish", 10),
        ("ids", "_delete_where", 0),
        ("ids", "half", 4),
        ("ids", "finish", 10),
        ("source", "removal", 10),
        ("ids", "removal", 10),
    ],
)
def test_a_killed_deletion_is_counted_once(path, of, where, gone):
    ids = [i for b in Store.open(path).scan(["id"], filter="source = 'A'") for i in b["id"].to_pylist()]
    child = warm.run([sys.executable, "-c", KILLED_NOTING, str(path), of, where])
    assert child.returncode == -9
    left = 10 - gone
    assert Store.open(path).sources().get("A", 0) == left
    assert taken_down(path).get("A", 0) == gone
    assert any("it was stopped" in problem for problem in verify(path).problems) == (left > 0)
    other = Path(shutil.copytree(path, path.with_name("other.lance")))
    assert Store.open(path).delete(**({"ids": ids} if of == "ids" else {"source": "A"})).rows == left
    check_gone(path)
    assert not list((path / "_takedowns").glob("*.pending"))
    store = Store.open(other)  # a write notes what is gone before it adds pictures of the same source
    store.append(rows_of("A", 30, 3))
    assert taken_down(other) == ({"A": gone} if gone else {})
    store.delete(source="A")
    assert taken_down(other) == {"A": 13}


KILLED = """
import os, signal, sys
from darkroom.data import store
from darkroom.data.store import Store
def killed(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
where = sys.argv[2]
if where == "remove_files":
    store.remove_files = killed
else:
    setattr(Store, where, killed)
Store.open(sys.argv[1]).delete(source="A")
"""


@pytest.mark.parametrize("where", ["_rewrite", "drop_old_versions", "remove_files"])
def test_killed_between_its_steps_it_is_finished(path, where):
    """By the same call, and by another write."""
    child = warm.run([sys.executable, "-c", KILLED, str(path), where])
    assert child.returncode == -9
    store = Store.open(path)
    assert store.sources() == {"B": 10}, "it was committed"
    told = " ".join(verify(path).problems)
    assert "--purge" in told
    if where != "remove_files":
        assert "deleted pictures are still on the disk" in told
        assert found_on_disk(path, "<picture A"), "the control: the kill came before the bytes went"
    other = Path(shutil.copytree(path, path.with_name("other.lance")))
    assert store.delete(source="A").rows == 0
    check_gone(path)
    Store.open(other).append(rows_of("B", 20, 1))
    check_gone(other)


def test_an_import_that_adds_nothing_finishes_it_too(tmp_path):
    for name, number in (("A", 0), ("B", 1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.png").write_bytes(encoded(noise_picture(number)))
        (tmp_path / name / "a.txt").write_text(name)
        import_pictures(tmp_path / name, tmp_path / "s.lance")
    picture = (tmp_path / "A" / "a.png").read_bytes()
    subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "s.lance"), "drop_old_versions"], check=False
    )
    files = list((tmp_path / "s.lance" / "data").iterdir())
    assert any(picture in file.read_bytes() for file in files)
    assert import_pictures(tmp_path / "B", tmp_path / "s.lance").added == 0
    files = list((tmp_path / "s.lance" / "data").iterdir())
    assert [picture in file.read_bytes() for file in files] == [False]


def test_what_a_run_has_pinned_stays_and_is_said(path):
    store = Store.open(path)
    version = store.pin("my-run")
    purged = store.delete(source="A").purged
    assert purged.pinned == {"my-run": version}
    assert purged.left_bytes > 0
    assert "'my-run'" in purged.lines()[0]
    assert Store.open(path, version=version).num_rows == 20
    found = verify(path)
    assert (found.problems, found.pinned) == ([], {"my-run": version})
    store.append(rows_of("B", 20, 1))
    assert found_on_disk(path, "<picture A"), "a write leaves what is pinned"
    assert Store.open(path).unpin("my-run")
    check_gone(path)


def test_what_a_killed_writer_left_is_found_and_removed(path):
    """As an import leaves that is killed before its commit; not while somebody writes."""
    lance.fragment.write_fragments(rows_of("A", 99, 1), Store.open(path).dataset, mode="append")
    found = verify(path)
    assert found.unreferenced_files >= 1
    assert any("that belong to no version" in problem for problem in found.problems)
    from darkroom.data.versions import writing

    with writing(path):
        assert verify(path, purge=True).others_writing
    assert verify(path).unreferenced_files == found.unreferenced_files, "the control: it may be in use"
    assert verify(path, purge=True).problems == []
    assert not found_on_disk(path, "<picture A 99>")


def test_verify_names_what_is_damaged(path):
    (data,) = [f for f in (path / "data").iterdir() if b"<picture B 12>" in f.read_bytes()]
    whole = data.read_bytes()
    data.write_bytes(whole.replace(b"<picture B 12>", b"<picture B 21>"))
    wrong = picture_id(b"<picture B 12>", "B 12")
    found = verify(path)
    assert found.problems == [f"1 pictures do not have the hash of their bytes and caption: {wrong}"]
    assert found.hashed == 19
    data.write_bytes(whole[:-100])
    assert any(f"has {len(whole) - 100:,} of {len(whole):,} bytes" in p for p in verify(path).problems)
    data.unlink()
    told = verify(path).problems
    assert any("is missing" in p for p in told)
    assert any("cannot be read after 0 rows" in p for p in told)
    assert verify(path).hashed == 15, "the other fragments are read all the same"


def test_verify_finds_wrong_counts(path):
    note = next((path / "_shapes").glob("*.json"))
    note.write_text(note.read_text().replace("24", "25"))
    assert any("sizes are noted for buckets" in problem for problem in verify(path).problems)


def test_the_commands(path):
    def run(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, list(arguments))
        return result.exit_code, result.output

    code, told = run("verify", str(path), "--json")
    assert (code, json.loads(told)["ok"], json.loads(told)["hashed"]) == (0, True, 20)
    (path / "data" / "left.lance").write_bytes(b"x" * 10)
    code, told = run("verify", str(path))
    assert code == 1
    assert "data/left.lance" in told
    code, told = run("verify", str(path), "--purge")
    assert code == 0
    assert "nothing is wrong" in told
    known = picture_id(b"<picture A 0>", "A 0")
    for ids in (["beef"], [known, "beef"]):
        with pytest.raises(StoreError, match="no picture with the id beef in .*; nothing was deleted"):
            Store.open(path).delete(ids=ids)
    assert Store.open(path).num_rows == 20
    assert Store.open(path).deleted_ids() == set()
    assert run("delete", str(path), "--id", known)[0] == 0
    code, told = run("delete", str(path), "--id", known)
    assert (code, "0 pictures deleted" in told) == (0, True), "the same call again goes well"
    assert Store.open(path).num_rows == 19


CALLS = {
    "write": "write,pwrite64,writev",
    "sync": "fsync,fdatasync",
    "rename": "rename,renameat,renameat2",
    "link": "link,linkat",
    "unlink": "unlink,unlinkat",
    "mkdir": "mkdir,mkdirat",
}
DELETE = "import sys; from darkroom.data.store import Store; Store.open(sys.argv[1]).delete(source='A')"


def killed_at(path: Path, calls: str, when: int, *, at: Path | None = None) -> bool:
    """Delete A, killed at a thread's n-th of some system calls, or of those on one file; whether it was."""
    where = ["-P", str(at)] if at is not None else []  # with --seccomp-bpf no call of `fsync` was killed
    inject = ["-e", f"trace={calls}", "-e", f"inject={calls}:signal=SIGKILL:when={when}"]
    command = ["strace", "-f", "-o", "/dev/null", *where, *inject, sys.executable, "-c", DELETE, str(path)]
    return subprocess.run(command, check=False, stderr=subprocess.DEVNULL, timeout=120).returncode != 0


def check_finished(path: Path) -> None:
    """The same call goes on; so does another write, where the deletion was committed."""
    other = Path(shutil.copytree(path, path.with_name("other.lance")))
    try:
        Store.open(path).delete(source="A")
    except StoreError:
        check_gone(other)  # it was killed when all was done
    check_gone(path)
    store = Store.open(other)
    if "A" not in store.sources():
        store.append(rows_of("B", 20, 1))
        check_gone(other)
    shutil.rmtree(path)
    shutil.rmtree(other)


@pytest.fixture
def strace() -> None:
    if shutil.which("strace") is None:
        missing("strace is not installed: apt-get install strace")


def leave(path: Path) -> list[Path]:
    """What killed writers leave: a whole data file, and halves of Lance's other files."""
    left = [
        path / "data" / "0123.lance",
        path / "_transactions" / ".tmpAbCdEf",
        path / "_versions" / ".tmpGhIjKl",
    ]
    for file in left:
        file.write_bytes(b"left")
    return left


def test_what_a_killed_import_left_goes_with_the_next(tmp_path):
    source, path = tmp_path / "source", tmp_path / "s.lance"
    source.mkdir()
    (source / "a.png").write_bytes(encoded(noise_picture(1)))
    (source / "a.txt").write_text("a")
    import_pictures(source, path)
    left = leave(path)
    with writing(path):
        import_pictures(source, path)
    assert all(file.exists() for file in left), "the control: somebody may be writing them"
    assert verify(path).unreferenced_files == 3
    assert import_pictures(source, path).added == 0
    assert not any(file.exists() for file in left)
    assert verify(path).problems == []
    assert Store.open(path).num_rows == 1


def test_a_store_is_made_where_a_kill_ended_its_making(tmp_path):
    path = tmp_path / "s.lance"
    for folder, file in (("_transactions", ".tmpAbCdEf"), ("_versions", "18446744073709551614.manifest#1")):
        (path / folder).mkdir(parents=True)
        (path / folder / file).write_bytes(b"")
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.png").write_bytes(encoded(noise_picture(1)))
    (source / "a.txt").write_text("a")
    assert import_pictures(source, path).added == 1
    assert verify(path).problems == []
    notes = tmp_path / "notes"
    (notes / "_versions").mkdir(parents=True)
    (notes / "a.txt").write_text("mine")
    for taken in (path, notes):
        with pytest.raises(StoreError, match="is there already"):
            Store.create(taken)


IMPORT = "import sys; from darkroom.data.importers.job import import_pictures as i; i(*sys.argv[1:])"


@pytest.mark.nightly
@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize("calls", ["mkdir", "write", "rename", "unlink", "openat"])
def test_an_import_killed_anywhere_goes_on(tmp_path, calls):
    """At each thread's first, second, ... call of a kind on the store; openat for some of its files alone."""
    source, path = tmp_path / "source", tmp_path / "s.lance"
    source.mkdir()
    for i in range(3):
        (source / f"{i}.png").write_bytes(encoded(noise_picture(i)))
        (source / f"{i}.txt").write_text(f"picture {i}")
    command = [sys.executable, "-c", IMPORT, str(source), str(path)]
    where = ["-P", str(path / "_versions"), "-P", str(path / "_transactions")] if calls == "openat" else []
    killed = 0
    for when in (1, 2, 3, 5, 8, 13):
        shutil.rmtree(path, ignore_errors=True)
        inject = ["-e", f"trace={calls}", "-e", f"inject={calls}:signal=SIGKILL:when={when}"]
        run = subprocess.run(
            ["strace", "-f", "-o", "/dev/null", *where, *inject, *command], check=False, timeout=120
        )
        killed += run.returncode != 0
        import_pictures(source, path)
        assert verify(path).problems == [], (calls, when)
        assert Store.open(path).num_rows == 3, (calls, when)
    assert killed, "the control: it makes such calls"


@pytest.mark.nightly
@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize("kind", CALLS)
def test_killed_at_each_threads_calls_that_write(made, tmp_path, kind):
    kills = 0
    path = Path(shutil.copytree(made, tmp_path / "s.lance"))
    while killed_at(path, CALLS[kind], kills + 1):
        kills += 1
        check_finished(path)
        shutil.copytree(made, path)
    assert kills >= 1, "the control: it makes such calls"
    check_gone(path)


@pytest.mark.nightly
@pytest.mark.usefixtures("strace")
def test_killed_at_the_removal_of_each_file(made, tmp_path):
    whole = Path(shutil.copytree(made, tmp_path / "whole.lance"))
    Store.open(whole).delete(source="A")
    files = [f.relative_to(made) for f in sorted(made.rglob("*")) if f.is_file()]
    gone = [file for file in files if not (whole / file).is_file()]
    assert len(gone) >= 8, "the control: it removes files"
    for file in gone:
        path = Path(shutil.copytree(made, tmp_path / "s.lance"))
        assert killed_at(path, CALLS["unlink"], 1, at=path / file), file
        check_finished(path)
