"""The store through its public API: positions, filters, versions, deleting for good, writers that race."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import lance
import numpy as np
import pyarrow as pa
import pytest
from material import rows

from darkroom.data.importers.source import widen
from darkroom.data.store import SCHEMA, FragmentInfo, Store, count_shapes
from darkroom.data.versions import conflicted, not_opened, plain, vanished, writing
from darkroom.errors import StoreError


def captions(store: Store, positions) -> list[str]:
    return store.take(positions, ["caption"])["caption"].to_pylist()


def test_a_new_store_is_empty_and_opens(tmp_path):
    Store.create(tmp_path / "a" / "new.lance")
    store = Store.open(tmp_path / "a" / "new.lance")
    assert (store.num_rows, store.fragments, store.dataset.schema.names) == (0, [], SCHEMA.names)
    assert list(store.select(None)) == []


def test_a_store_is_not_made_over_something_else(store, tmp_path):
    with pytest.raises(StoreError, match="there already"):
        Store.create(store.path)
    (tmp_path / "notes.txt").write_text("keep")
    with pytest.raises(StoreError, match="there already"):
        Store.create(tmp_path)
    assert Store.open_or_create(store.path).num_rows == 50


def test_what_is_no_store_is_told_in_one_line(store, tmp_path):
    with pytest.raises(StoreError, match="no picture store at .*; make one with: darkroom import"):
        Store.open(tmp_path / "none.lance")
    with pytest.raises(StoreError, match="has no version 99"):
        Store.open(store.path, version=99)
    lance.write_dataset(pa.table({"a": [1]}), tmp_path / "other.lance")
    with pytest.raises(StoreError, match="no picture store; lacks: id, picture"):
        Store.open(tmp_path / "other.lance")


def test_where_no_store_can_be_made_is_told_in_one_line():
    with pytest.raises(StoreError, match="^no store can be made at /proc/s.lance: ") as caught:
        Store.open_or_create("/proc/s.lance")
    assert "\n" not in str(caught.value)
    assert ".rs:" not in str(caught.value)


def test_a_machine_that_fails_is_no_damage(store):
    """Lance has the system's number in its message."""
    for error, told in (
        (OSError("LanceError(IO): Too many open files (os error 24)"), "could not be read: .*Too many open"),
        (OSError("LanceError(IO): Generic S3 error: error sending request for url"), "could not be read: "),
    ):
        found = not_opened(store.path, None, error)
        assert re.search(told, str(found))
        assert found.exit_code == 1
    assert "is damaged: " in str(not_opened(store.path, None, ValueError("bad magic")))


def test_positions_follow_the_fragments(store):
    assert [(f.num_rows, f.offset) for f in store.fragments] == [(20, 0), (20, 20), (10, 40)]
    assert isinstance(store.fragments[0], FragmentInfo)
    assert captions(store, [49, 0, 20, 20, 7]) == [f"caption {i}" for i in (49, 0, 20, 20, 7)]
    assert captions(store, np.array([], np.int64)) == []


def test_after_deleting_positions_are_whole_again(store):
    store.delete(ids=[f"{i:032x}" for i in (3, 4, 25)])
    left = captions(store, store.select(None))
    assert sorted(left) == sorted(f"caption {i}" for i in range(50) if i not in (3, 4, 25))
    assert left == [c for b in store.scan(["caption"]) for c in b.column("caption").to_pylist()]
    assert [f.offset for f in store.fragments] == np.cumsum([0] + [f.num_rows for f in store.fragments])[
        :-1
    ].tolist()
    for fragment in store.fragments:
        ids = store.dataset.get_fragment(fragment.id).to_table(columns=["caption"])["caption"].to_pylist()
        assert captions(store, range(fragment.offset, fragment.offset + fragment.num_rows)) == ids


@pytest.mark.parametrize("positions", [[50], [-1], [0, 10**12]])
def test_a_position_beyond_the_rows_is_an_error(store, positions):
    with pytest.raises(IndexError, match="in a store of 50 rows"):
        store.take(positions, ["caption"])


def test_scan_gives_all_rows_in_order_and_can_filter(store):
    batches = list(store.scan(["phash"], batch_rows=8))
    assert pa.concat_arrays([b.column("phash") for b in batches]).to_pylist() == list(range(50))
    assert max(batch.num_rows for batch in batches) <= 8
    few = [b.column("phash").to_pylist() for b in store.scan(["phash"], filter="phash % 25 = 1")]
    assert few == [[1], [26]]


def test_select_gives_positions_not_row_addresses(store):
    store.delete(ids=[f"{0:032x}"])
    found = store.select("phash >= 47 OR phash = 1")
    assert found.tolist() == sorted(found)
    assert sorted(captions(store, found)) == [f"caption {i}" for i in (1, 47, 48, 49)]
    assert store.select(None).tolist() == list(range(49))


@pytest.mark.parametrize(
    ("filter", "told"),
    [
        ("widht >= 512", "no column 'widht'.*did you mean width"),
        ("width >=", "filter 'width >=': .*Expected: an expression"),
        ("width = 'wide'", "could not convert to literal of type 'Int32'"),
        ('"width" >= 512', "the column is `width`"),
        ("nearest_to(width)", "Invalid function 'nearest_to'"),
    ],
)
def test_a_wrong_filter_is_told_in_one_line(store, filter, told):
    with pytest.raises(StoreError, match=told) as caught:
        store.select(filter)
    assert "\n" not in str(caught.value)
    assert ".rs" not in str(caught.value)
    with pytest.raises(StoreError, match=told):
        list(store.scan(["id"], filter=filter))


def test_an_unknown_column_names_the_nearest(store):
    with pytest.raises(StoreError, match="did you mean caption"):
        store.take([0], ["captions"])


def test_appending_fills_other_columns_with_null(store):
    store.add_columns([pa.field("score", pa.float64(), metadata={"darkroom.kind": "score"})])
    store.append(rows(5, 50).append_column("score", pa.array([1.0] * 5)))
    store.append(rows(5, 55))
    assert store.columns()["score"] == {"darkroom.kind": "score"}
    assert store.select("score = 1.0").tolist() == [50, 51, 52, 53, 54]
    assert len(store.select("score IS NULL")) == 55


def test_nothing_appended_makes_no_version(store):
    version = store.version
    assert store.append(rows(0)) == 0
    assert store.version == version


def test_a_stale_writer_loses_nothing(store):
    stale = Store.open(store.path)
    store.append(rows(5, 50))
    store.add_columns([pa.field("score", pa.float64())])
    stale.append(rows(5, 55))
    assert stale.num_rows == 60
    assert stale.dataset.schema.names == [*SCHEMA.names, "score"]


def fill(store: Store, name: str) -> None:
    """Fill a column of the fragments there are, in the way of a job that adds columns."""
    table = pa.table({"id": [f"{i:032x}" for i in range(50)], name: pa.array(range(50), pa.int32())})
    for _ in range(50):
        # Whoever writes data files holds this lock, or a purge takes them for a killed writer's.
        with writing(store.sidecars.root):
            store.refresh()
            parts = [
                fragment.update_columns(table, left_on="id", right_on="id")
                for fragment in store.dataset.get_fragments()
            ]
            operation = lance.LanceOperation.Update(
                updated_fragments=[p[0] for p in parts], fields_modified=parts[0][1]
            )
            try:
                lance.LanceDataset.commit(store.dataset, operation, read_version=store.version)
            except OSError:
                continue  # another was quicker
        return
    raise AssertionError("never came through")


def test_writers_that_race_lose_nothing(store):
    """Appends, columns that are added and filled, and a deletion, all at once."""
    store.add_columns([pa.field("filled", pa.int32())])

    def append(start: int) -> None:
        mine = Store.open(store.path)
        for i in range(4):
            mine.append(rows(3, start + 3 * i))

    def add(name: str) -> None:
        Store.open(store.path).add_columns([pa.field(name, pa.int32())])

    with ThreadPoolExecutor(7) as pool:
        works = [pool.submit(append, 100 * n) for n in (1, 2, 3)]
        works += [pool.submit(add, name) for name in "ab"]
        works += [pool.submit(lambda: fill(Store.open(store.path), "filled"))]
        works += [pool.submit(lambda: Store.open(store.path).delete(ids=[f"{7:032x}"]))]
    for work in works:
        work.result()
    store.refresh()
    expected = [*(i for i in range(50) if i != 7), *(100 * n + i for n in (1, 2, 3) for i in range(12))]
    found = store.take(store.select(None), ["phash", "filled"]).to_pylist()
    assert sorted(row["phash"] for row in found) == expected
    assert {row["phash"]: row["filled"] for row in found if row["phash"] < 50} == {
        i: i for i in range(50) if i != 7
    }
    assert {"a", "b"} <= set(store.dataset.schema.names)


def on_disk(path: str, text: bytes) -> bool:
    return subprocess.run(["grep", "-rqaF", text, path]).returncode == 0


def test_deleting_takes_the_bytes_off_the_disk(store):
    assert on_disk(store.path, b"picture 21")
    assert store.delete(ids=[f"{21:032x}"]).rows == 1
    assert store.num_rows == 49
    assert not on_disk(store.path, b"picture 21")
    assert on_disk(store.path, b"picture 22"), "the control: its neighbour is still there"
    assert store.deleted_ids() == {f"{21:032x}"}
    assert sorted(f.num_rows for f in store.fragments) == [10, 19, 20]


def test_a_pinned_version_keeps_what_was_deleted(store):
    version = store.pin("runs/my run")
    store.delete(ids=[f"{21:032x}"])
    assert Store.open(store.path, version=version).num_rows == 50
    assert on_disk(store.path, b"picture 21")
    assert list(store.pins().values()) == [version]
    assert store.unpin("runs/my run")
    assert not store.unpin("runs/my run")
    store.drop_old_versions()
    assert not on_disk(store.path, b"picture 21")
    with pytest.raises(StoreError, match="has no version"):
        Store.open(store.path, version=version)


def test_a_pin_leaves_no_folder_beside_a_store_of_any_name(tmp_path):
    """Lance makes one of the percent-encoded name when it writes a tag."""
    root = tmp_path / "Bücher #1 [~]"
    store = Store.create(root / "100 %" / "日本.lance")
    assert store.pin("run") == store.version
    assert [path.name for path in tmp_path.iterdir()] == [root.name]
    twin = tmp_path / "B%C3%BCcher %231 %5B%7E%5D"
    twin.mkdir()
    (twin / "mine.txt").write_text("kept")
    store.pin("another")
    assert [path.name for path in twin.iterdir()] == ["mine.txt"]
    assert store.pins() == {"run": store.version, "another": store.version}


def test_pins_that_look_alike_stay_apart(store):
    first = store.pin("runs/a")
    store.append(rows(1, 50))
    second = store.pin("runs_a")
    assert sorted(store.pins().values()) == [first, second]
    assert store.pin("runs/a") == second
    assert sorted(store.pins().values()) == [second, second]


def test_deleting_a_source(store):
    store.append(rows(5, 50, source="other's"))
    assert store.sources() == {"made": 50, "other's": 5}
    with pytest.raises(StoreError, match="no source 'othres'; .*did you mean other's"):
        store.delete(source="othres")
    assert store.delete(source="other's").rows == 5
    assert store.sources() == {"made": 50}
    assert store.deleted_ids() == set()
    with pytest.raises(StoreError, match="either ids or source"):
        store.delete()


def test_compacting_joins_fragments_and_keeps_positions(store):
    before = captions(store, store.select(None))
    store.compact()
    assert [f.num_rows for f in store.fragments] == [50]
    assert captions(store, store.select(None)) == before
    assert len(store.dataset.versions()) == 1


def test_prepared_columns_survive_deleting_and_compacting(store):
    type_ = pa.struct([("moments", pa.large_binary()), ("width", pa.int16())])
    field = pa.field("latents", type_, metadata={"darkroom.kind": "latents", "darkroom.encoder": "ab"})
    store.add_columns([field])
    values = [{"moments": b"%d" % i * 100, "width": i} for i in range(50)]
    for fragment in store.fragments:
        ids = store.take(range(fragment.offset, fragment.offset + fragment.num_rows), ["id"])["id"]
        table = pa.table({"id": ids, "latents": pa.array([values[int(i.as_py(), 16)] for i in ids], type_)})
        metadata, fields = store.dataset.get_fragment(fragment.id).update_columns(table, "id", "id")
        operation = lance.LanceOperation.Update(updated_fragments=[metadata], fields_modified=fields)
        store.commit(
            lambda o=operation: lance.LanceDataset.commit(store.dataset, o, read_version=store.version)
        )
    store.delete(ids=[f"{9:032x}"])
    store.compact()
    found = {
        r["phash"]: r["latents"] for r in store.take(store.select(None), ["phash", "latents"]).to_pylist()
    }
    assert found == {i: values[i] for i in range(50) if i != 9}
    assert store.columns()["latents"] == {"darkroom.kind": "latents", "darkroom.encoder": "ab"}


def test_shapes_are_noted_and_true_after_any_change(tmp_path):
    store = Store.create(tmp_path / "s.lance")
    store.append(rows(6, width=lambda i: 10 + i % 2))
    store.append(rows(4, 6, width=lambda i: 30))
    assert store.shapes() == [{(10, 20): 3, (11, 20): 3}, {(30, 20): 4}]
    store.delete(ids=[f"{i:032x}" for i in (1, 6)])
    assert sum(store.shapes(), Counter()) == {(10, 20): 3, (11, 20): 2, (30, 20): 3}
    store.compact()
    assert store.shapes() == [{(10, 20): 3, (11, 20): 2, (30, 20): 3}]
    assert store.shapes() == [count_shapes(store.scan(["width", "height"]))]


def test_widening_a_column(store):
    store.add_columns([pa.field("n", pa.int64())])
    store.append(rows(1, 50).append_column("n", pa.array([7])))
    widen(store, {"n": pa.float64()})
    store.append(rows(1, 51).append_column("n", pa.array([0.5])))
    assert store.take([50, 51], ["n"])["n"].to_pylist() == [7.0, 0.5]


def test_lances_messages_are_read_with_windows_paths():
    gone = r"LanceError(IO): Not found: C:\pictures\s.lance\_versions\3.manifest, C:\build\rust\io.rs:1:2"
    assert vanished(OSError(gone))
    assert vanished(OSError(gone.replace("\\", "/")))
    assert not vanished(OSError(r"Not found: C:\pictures\_versions.txt"))
    assert not conflicted(OSError(r"cannot read C:\conflict\s.lance"))
    assert conflicted(OSError("Commit conflict for version 3"))
    assert plain(OSError(gone)).endswith("3.manifest")
