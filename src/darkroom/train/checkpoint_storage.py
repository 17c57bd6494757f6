"""Where a run's checkpoints are: its own folder, or an address of an object store.

Object stores have no rename. There each checkpoint has a prefix of its own, `step-00000500.<token>/`, and
its manifest, put last and in one piece, is what makes it count: a reader finds a whole checkpoint or
none. It is read back and hashed before an older one goes, whose manifest goes first. The address also holds
the run's metrics and bill, so that a run goes on in an empty folder.

`Saver` saves the state of a run while it goes on: copied off the device, then written by a thread.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

import darkroom
from darkroom import hardware
from darkroom.errors import CheckpointError, DamagedCheckpoint, MissingExtra, RecipeError
from darkroom.hardware import accelerator
from darkroom.hardware.system import remove_tree, sync_file, write_atomically
from darkroom.options import COPIED_BYTES
from darkroom.run import differences
from darkroom.train import checkpoint as local
from darkroom.train.checkpoint import Checkpoint, Parts, Say, Tensors
from darkroom.train.ranks import ALONE, Ranks

RECORDS = ("metrics.jsonl", "environment.json", "bill.json", "odd_batches.jsonl")  # of a run
BLOCK_BYTES = 32 * 2**20  # of a file that is sent in parts: 10,000 of them are 320 GB
POLL_S = 0.2
SHARES_WAIT_S = 1800.0
_NAME = re.compile(r"(step-\d{8,})\.[0-9a-z-]+")


@dataclass(frozen=True)
class Kept:
    """A checkpoint that is there; whether it is whole is not yet known."""

    step: int
    name: str


class CheckpointStorage(Protocol):
    """Where checkpoints are kept. A save is known by its step and a token that no other has."""

    address: str

    def prepare(self) -> None:
        """Make sure that it can be written, and clear away what killed processes left."""

    def kept(self) -> list[Kept]:
        """Oldest first."""

    def write_share(
        self, step: int, token: str, rank: int, size: int, tensors: Tensors, parts: Parts
    ) -> None:
        """Write what one process holds or has taken on."""

    def complete(self, step: int, token: str, size: int, scalars: Mapping[str, Any], keep: int) -> None:
        """When all shares are there: bind them, verify them, delete all but the newest `keep`."""

    def failed(self, step: int, token: str, rank: int) -> None:
        """This process will not come with its share."""

    def load(self, kept: Kept) -> Checkpoint:
        """Read one, every hash verified; CheckpointError says what is damaged."""

    def open(self, kept: Kept, ranks: Ranks) -> Checkpoint:
        """Read one that rank 0 has loaded; every other rank calls this once, and rank 0 meets them."""

    def forget(self) -> None:
        """Let go of copies that were made to read from."""


class LocalPlace:
    """A folder of the run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.address = folder, str(folder)

    def prepare(self) -> None:
        local.clear_leftovers(self.folder)

    def kept(self) -> list[Kept]:
        return [Kept(local.step_of(path), path.name) for path in local.checkpoints(self.folder)]

    def write_share(
        self, step: int, token: str, rank: int, size: int, tensors: Tensors, parts: Parts
    ) -> None:
        local.write_share(local.temporary_folder(self.folder, step, token), rank, size, tensors, parts)

    def complete(self, step: int, token: str, size: int, scalars: Mapping[str, Any], keep: int) -> None:
        local.complete(local.temporary_folder(self.folder, step, token), step, size, scalars, keep=keep)

    def failed(self, step: int, token: str, rank: int) -> None:
        if rank:
            local.note_failure(local.temporary_folder(self.folder, step, token), rank)
        else:
            local.clear_leftovers(self.folder)

    def load(self, kept: Kept) -> Checkpoint:
        return local.load_checkpoint(self.folder / kept.name)

    def open(self, kept: Kept, ranks: Ranks) -> Checkpoint:
        return local.open_checkpoint(self.folder / kept.name)

    def forget(self) -> None:
        """Nothing was copied."""


class RemotePlace:
    """An address such as s3://bucket/prefix. The records in `run`, the run's folder, go with each checkpoint.

    Raises RecipeError where fsspec does not know the address, MissingExtra where a package for it lacks.
    """

    def __init__(self, url: str, run: Path) -> None:
        self.address, self._run = url.rstrip("/"), run
        self._fs, root = _filesystem(self.address)
        self._root = str(root).rstrip("/")
        self._in_files = "file" in _protocols(self._fs)

    def prepare(self) -> None:
        """Write and delete a probe, and remove unfinished checkpoints. RecipeError where the address
        cannot be written, CheckpointError where the storage fails.
        """
        probe = f"{self._root}/.probe"
        try:
            self._fs.pipe_file(probe, b"darkroom")
            self._fs.rm_file(probe)
        except Exception as error:  # each kind of store has its own
            message = f"'{self.address}' cannot be written: {local.line_of(error)}"
            if isinstance(error, FileNotFoundError | PermissionError | NotADirectoryError | ValueError):
                raise RecipeError("checkpoint.url", message) from error
            if local.is_bug(error):
                raise
            raise CheckpointError(f"checkpoint.url: {message}") from error
        whole = {kept.name for kept in self.kept()}
        for name in self._names():
            if name not in whole:
                self._fs.rm(f"{self._root}/{name}", recursive=True)
        self._drop_parts()

    def kept(self) -> list[Kept]:
        found = [name for name in self._names() if self._fs.exists(self._at(name, "manifest.json"))]
        pairs = [(local.step_of(Path(name.partition(".")[0])), name) for name in found]
        return [Kept(step, name) for step, name in sorted(pairs)]

    def _names(self) -> list[str]:
        self._fs.invalidate_cache()
        try:
            listed = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        names = [path.rstrip("/").rpartition("/")[2] for path in listed]
        return [name for name in names if _NAME.fullmatch(name)]

    def _at(self, name: str, file: str) -> str:
        return f"{self._root}/{name}/{file}"

    # ---- writing

    def write_share(
        self, step: int, token: str, rank: int, size: int, tensors: Tensors, parts: Parts
    ) -> None:
        """Upload one rank's tensors, and last the index that says its share is complete."""
        name = _name(step, token)
        files = {
            file: self._put(self._at(name, file), chunks) | cut
            for file, chunks, cut in local.share_of(rank, size, tensors, parts)
        }
        index = b"".join(map(bytes, local.as_json(files)))
        self._put_whole(self._at(name, local.index_name(rank)), index)

    def complete(self, step: int, token: str, size: int, scalars: Mapping[str, Any], keep: int) -> None:
        """Wait for every rank's share, verify all files, then put the manifest: only now it counts.

        Raises CheckpointError where a share failed or a file did not arrive as it was sent.
        """
        name = _name(step, token)
        files: dict[str, Any] = {}
        for rank in range(size):
            files |= self._await(name, rank)
        for record in RECORDS:
            if (path := self._run / record).is_file():
                files[record] = self._put(self._at(name, record), iter([path.read_bytes()]))
        files["state.json"] = self._put(self._at(name, "state.json"), local.as_json(scalars))
        self._prove(name, files)
        manifest = b"".join(map(bytes, local.as_json(local.manifest_of(step, files))))
        self._put_whole(self._at(name, "manifest.json"), manifest)
        if self._fs.cat_file(self._at(name, "manifest.json")) != manifest:
            raise CheckpointError(f"'{self._at(name, 'manifest.json')}' reads back as something else")
        for rank in range(size):
            self._fs.rm_file(self._at(name, local.index_name(rank)))
        self._delete_older(Kept(step, name), keep)

    def _put(self, key: str, chunks: Iterator[bytes | memoryview]) -> dict[str, Any]:
        """Send a file, in parts where it is large, and hash it on the way."""
        digest, size = hashlib.sha256(), 0
        with self._fs.open(key, "wb", block_size=BLOCK_BYTES) as stream:
            for chunk in chunks:
                for start in range(0, len(chunk), BLOCK_BYTES):
                    piece = chunk[start : start + BLOCK_BYTES]
                    stream.write(piece)
                    digest.update(piece)
                size += len(chunk)
        if self._in_files:
            sync_file(Path(key))
        return {"bytes": size, "sha256": digest.hexdigest()}

    def _put_whole(self, key: str, content: bytes) -> None:
        """Put what others look for, in one step: on file systems a file is there before all that is in it."""
        if self._in_files:
            write_atomically(Path(key), content, durable=True)
        else:
            self._fs.pipe_file(key, content)

    def _await(self, name: str, rank: int) -> dict[str, Any]:
        """What a process sent, when it has."""
        index, until = self._at(name, local.index_name(rank)), time.monotonic() + SHARES_WAIT_S
        while True:
            self._fs.invalidate_cache()
            if self._fs.exists(index):
                with suppress(json.JSONDecodeError):  # sftp and the like show what is not all there yet
                    found: dict[str, Any] = json.loads(self._fs.cat_file(index))
                    return found
            if self._fs.exists(f"{index}.failed"):
                raise CheckpointError(f"rank {rank} could not write its share to {self.address}")
            if time.monotonic() > until:
                raise CheckpointError(f"rank {rank} has not written its share for {SHARES_WAIT_S:g} s")
            time.sleep(POLL_S)

    def failed(self, step: int, token: str, rank: int) -> None:
        """Say that a rank could not write its share; rank 0 removes what has no manifest. Never raises."""
        with suppress(Exception):  # the store that just failed may fail again
            name = _name(step, token)
            if rank:
                self._fs.pipe_file(self._at(name, f"{local.index_name(rank)}.failed"), b"")
            elif not self._fs.exists(self._at(name, "manifest.json")):
                self._fs.rm(f"{self._root}/{name}", recursive=True)

    def _prove(self, name: str, files: Mapping[str, Any]) -> None:
        damaged = [
            problem for file, entry in files.items() if (problem := self._copy(name, file, entry, None))
        ]
        if damaged:
            raise CheckpointError(f"'{self._root}/{name}' did not arrive whole: {', '.join(damaged)}")

    def _delete_older(self, new: Kept, keep: int) -> None:
        """Older ones, and others of the same step, which resuming passed over; the manifest goes first."""
        others = [kept for kept in self.kept() if kept != new]
        same = [kept for kept in others if kept.step == new.step]
        older = [kept for kept in others if kept.step != new.step]
        for kept in same + older[: max(0, len(older) - keep + 1)]:
            self._fs.rm_file(self._at(kept.name, "manifest.json"))
            self._fs.rm(f"{self._root}/{kept.name}", recursive=True)

    def _drop_parts(self) -> None:
        """End uploads that killed processes left unfinished under this address; S3 keeps and bills them."""
        if "s3" not in _protocols(self._fs):
            return
        bucket, _, prefix = self._root.partition("/")
        with suppress(Exception):  # a right that a user need not have
            for upload in self._fs.list_multipart_uploads(bucket):
                if upload["Key"].startswith(f"{prefix}/step-" if prefix else "step-"):
                    self._fs.call_s3(
                        "abort_multipart_upload",
                        Bucket=bucket,
                        Key=upload["Key"],
                        UploadId=upload["UploadId"],
                    )

    # ---- reading

    def load(self, kept: Kept) -> Checkpoint:
        """Download a checkpoint, verify each file by its SHA-256, and open it. Raises DamagedCheckpoint."""
        label, folder, damaged = f"checkpoint '{self._address_of(kept)}'", self._folder(kept), list[str]()
        with local.reading(label):
            raw = self._fs.cat_file(self._at(kept.name, "manifest.json"))
            files = local.read_manifest(raw, kept.step, label)["files"]
            if not _holds(folder, raw):
                remove_tree(folder.parent)
                folder.mkdir(parents=True)
                copied = (self._copy(kept.name, file, entry, folder) for file, entry in files.items())
                damaged = [*filter(None, copied)]
        if damaged:
            remove_tree(folder.parent)
            raise DamagedCheckpoint(f"{label} is damaged: {', '.join(damaged)}")
        with local.reading(label):
            write_atomically(folder / "manifest.json", raw)  # last: with it the copy is whole
        return local.open_checkpoint(folder)

    def open(self, kept: Kept, ranks: Ranks) -> Checkpoint:
        """On rank 0's machine its copy is read; every other machine makes one of its own."""
        if ranks.local_rank == 0:
            return self.load(kept)
        until = time.monotonic() + SHARES_WAIT_S
        while not (self._folder(kept) / "manifest.json").exists():
            if time.monotonic() > until:
                raise CheckpointError(f"'{self._address_of(kept)}' was not read for {SHARES_WAIT_S:g} s")
            time.sleep(POLL_S)
        return local.open_checkpoint(self._folder(kept))

    def forget(self) -> None:
        for copy in (self._run / "checkpoints").glob(".read-*"):
            remove_tree(copy)

    def _folder(self, kept: Kept) -> Path:
        """Where a copy to read from lies, while it is read."""
        return self._run / "checkpoints" / f".read-{kept.name}" / kept.name.partition(".")[0]

    def _address_of(self, kept: Kept) -> str:
        return f"{self.address}/{kept.name}"

    def _copy(self, name: str, file: str, entry: Mapping[str, Any], to: Path | None) -> str | None:
        """Read a file whole, into a folder where one is given; what is wrong with it, or None."""
        digest, size = hashlib.sha256(), 0
        target = None if to is None else (to / file).open("wb")
        try:
            with self._fs.open(
                self._at(name, file), "rb", block_size=BLOCK_BYTES, cache_type="none"
            ) as stream:
                while chunk := stream.read(BLOCK_BYTES):
                    digest.update(chunk)
                    size += len(chunk)
                    if target is not None:
                        target.write(chunk)
        except FileNotFoundError:
            return f"{file}: no such object"
        finally:
            if target is not None:
                target.close()
        if size != entry["bytes"]:
            return f"{file} has {size} bytes, not {entry['bytes']}"
        return None if digest.hexdigest() == entry["sha256"] else f"{file} has another hash"


def place_of(url: str | None, run: Path) -> CheckpointStorage:
    """Where a run's checkpoints go."""
    return LocalPlace(run / "checkpoints") if url is None else RemotePlace(url, run)


def take_records(checkpoint: Checkpoint, run: Path) -> None:
    """Put a run's records, as they were when it was saved, into a folder for it."""
    run.mkdir(parents=True, exist_ok=True)
    for record in RECORDS:
        if (there := checkpoint.path / record).is_file():
            shutil.copyfile(there, run / record)


def check_url(url: str | None) -> None:
    """RecipeError or MissingExtra where checkpoints cannot go to an address, before any work."""
    if url is not None:
        _filesystem(url)


def newest(
    places: Sequence[CheckpointStorage], say: Say, ranks: Ranks
) -> tuple[CheckpointStorage, Checkpoint] | tuple[None, None]:
    """The newest whole checkpoint of all places, on every rank; (None, None) if there is none at all.

    Rank 0 verifies. A damaged one is passed over aloud; CheckpointError where all are.
    """
    found = _newest(places, say) if ranks.first else None
    newest_kept = ranks.broadcast(lambda: found and [places.index(found[0]), found[1].step, found[1].name])
    if newest_kept is None:
        return None, None
    place = places[newest_kept[0]]
    opened = found[2] if found else place.open(Kept(newest_kept[1], newest_kept[2]), ranks)
    ranks.barrier()
    return place, opened


def _newest(
    places: Sequence[CheckpointStorage], say: Say
) -> tuple[CheckpointStorage, Kept, Checkpoint] | None:
    there = [(kept.step, -i, kept.name, kept) for i, place in enumerate(places) for kept in place.kept()]
    damaged = []
    for _, i, _, kept in sorted(there, key=lambda one: one[:3], reverse=True):
        try:
            return places[-i], kept, places[-i].load(kept)
        except DamagedCheckpoint as error:
            damaged.append(str(error))
            say(f"{error}; trying the one before")
    if damaged:
        addresses = "' and '".join(place.address for place in places)
        raise CheckpointError(f"none of {len(damaged)} checkpoints in '{addresses}' is whole: {damaged[0]}")
    return None


def _filesystem(url: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError as error:
        raise MissingExtra("fsspec", "s3") from error
    try:
        options = {"auto_mkdir": True} if "://" not in url or url.startswith(("file:", "local:")) else {}
        filesystem, root = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        if url.startswith(("s3:", "s3a:")):
            raise MissingExtra("s3fs", "s3") from error
        raise RecipeError("checkpoint.url", f"'{url}': {local.line_of(error)}") from error
    except ValueError as error:
        raise RecipeError(
            "checkpoint.url",
            f"'{url}': {local.line_of(error)}",
            allowed="an address such as s3://bucket/prefix or file:///folder",
        ) from error
    if not str(root).strip("/"):
        raise RecipeError("checkpoint.url", f"'{url}' names no place", allowed="s3://bucket/prefix")
    return filesystem, root


def _protocols(filesystem: Any) -> Sequence[str]:
    protocol = filesystem.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def _name(step: int, token: str) -> str:
    return f"step-{step:08d}.{token}"


def _holds(folder: Path, manifest: bytes) -> bool:
    """Whether a copy that was read before is this checkpoint's, and still whole."""
    there = folder / "manifest.json"
    if not there.is_file() or there.read_bytes() != manifest:
        return False
    with suppress(DamagedCheckpoint):
        local.load_checkpoint(folder)
        return True
    return False


# ---- saving while a run goes on, and going on where it stopped: what may differ from the session before
#
# A save that fails (a full disk) leaves older checkpoints as they are, is logged, and is tried again when the
# next one is due. The first one of a run must not fail: a place that cannot be written ends the run at once.


class Saver:
    """Writes checkpoints of one session, one at a time, behind the training loop."""

    def __init__(
        self, place: CheckpointStorage | Path, *, keep: int, ranks: Ranks, say: Say, background: bool = True
    ) -> None:
        """`place` is where checkpoints go: a folder, or an address."""
        self.place = LocalPlace(place) if isinstance(place, Path) else place
        self._keep, self._ranks, self._say = keep, ranks, say
        self._background = background
        if ranks.first:
            self.place.prepare()
        # By time, so that of two saves of one step the later one is found first.
        self._token: str = ranks.broadcast(lambda: f"{time.time_ns():x}-{os.urandom(3).hex()}")
        self._thread: threading.Thread | None = None
        self._failed: Exception | None = None
        self._proven = ranks.broadcast(
            lambda: bool(self.place.kept())
        )  # that a checkpoint can be written there
        self._tried = False
        self._pinned: dict[str, Tensor] = {}

    def save(self, step: int, tensors: Tensors, scalars: Mapping[str, Any], parts: Parts) -> None:
        """Save the state after `step` steps; returns when it is copied, while it is still being written; a
        large one in main memory when it is written.

        `tensors` are what this rank holds: all of each, or with `parts` its rows.
        """
        self._settle()
        mine = {kind: self._own(named, parts) for kind, named in tensors.items()}
        in_place = self._in_place(mine)
        copied = mine if in_place else {kind: self._copied(kind, named) for kind, named in mine.items()}
        for device in {tensor.device for named in mine.values() for tensor in named.values()}:
            accelerator.synchronize(device)
        self._tried = True
        if in_place or not self._background:
            self._write(step, copied, scalars, parts)
            self._settle()
            return
        self._thread = threading.Thread(
            target=self._write, args=(step, copied, scalars, parts), name="save", daemon=True
        )
        self._thread.start()

    def look(self) -> None:
        """Hear of what was written meanwhile, without waiting; CheckpointError where the first one failed."""
        if self._thread is not None and not self._thread.is_alive():
            self._settle()

    def newest(self) -> Kept | None:
        """The newest checkpoint that is there, where it can be seen."""
        try:
            return next(reversed(self.place.kept()), None)
        except Exception:  # an address that cannot be reached
            return None

    def finish(self) -> None:
        """Wait for what is being written; CheckpointError where it failed: nothing comes after it."""
        self._settle(last=True)

    def _settle(self, *, last: bool = False) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._failed = self._failed, None
        if error is None:
            self._proven = self._proven or self._tried
            return
        kept = self.newest()
        intact = f"the checkpoint of step {kept.step} is intact" if kept else "there is none before it"
        message = f"a checkpoint could not be written: {error}; {intact}"
        if last or not self._proven:
            raise CheckpointError(message) from error
        self._say(f"warning: {message}; training goes on, the next one is tried when it is due")

    def _own(self, named: Mapping[str, Tensor], parts: Parts) -> dict[str, Tensor]:
        """What this rank writes of what it holds."""
        ranks = self._ranks
        if not ranks.sharded:  # all hold all: share the work
            return {name: t for i, (name, t) in enumerate(named.items()) if i % ranks.size == ranks.rank}
        return {
            name: tensor
            for name, tensor in named.items()
            if tensor.dim() or parts[name.rpartition("/")[0]][0] == 0  # a number is the same for all rows
        }

    def _in_place(self, tensors: Tensors) -> bool:
        """Whether a state is written from where it is, before training goes on: on a CPU, into a folder."""
        held = [tensor for named in tensors.values() for tensor in named.values()]
        if not isinstance(self.place, LocalPlace) or any(tensor.device.type != "cpu" for tensor in held):
            return False
        return not self._background or sum(tensor.nbytes for tensor in held) > COPIED_BYTES

    def _copied(self, kind: str, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies in the computer's memory; those of a GPU's tensors go where the last ones were."""
        return {name: self._copy(f"{kind}:{name}", tensor.detach()) for name, tensor in named.items()}

    def _copy(self, key: str, tensor: Tensor) -> Tensor:
        if not accelerator.kind_of(tensor.device).streams:
            return tensor.to("cpu", copy=True)
        held = self._pinned.get(key)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            held = self._pinned[key] = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return held.copy_(tensor, non_blocking=True)

    def _write(self, step: int, tensors: Tensors, scalars: Mapping[str, Any], parts: Parts) -> None:
        ranks, place = self._ranks, self.place
        try:
            place.write_share(step, self._token, ranks.rank, ranks.size, tensors, parts)
            if ranks.first:
                place.complete(step, self._token, ranks.size, scalars, self._keep)
        except Exception as error:
            self._failed = error
            place.failed(step, self._token, ranks.rank)


# These change what is watched, kept or how data is read ahead, never what is learned.
HARMLESS = (
    *(
        "checkpoint.*",
        "sample.*",
        "evaluate.*",
        "track.*",
        "budget.*",
        "train.log_every",
        "train.nonfinite_policy",
        "train.blocks_to_swap",
    ),
    *(
        "data.workers",
        "data.prefetch_batches",
        "data.cache",
        "data.cache_gb",
        "data.store",
        "data.online.*",
        "parallel.timeout_s",
    ),  # a store that was moved: version and rows are checked
)
# These change the last bits of every number: allowed, and said.
INEXACT = ("train.precision", "train.micro_batch", "train.device", "train.channels_last", "parallel.*")


def check_changes(before: Mapping[str, Any], now: Mapping[str, Any], step: int) -> list[str]:
    """Notes on what changed in the recipe since the run's last session.

    Raises RecipeError that names every key whose change would make it another run.
    """
    changed = differences(before, now)
    changed = {key: pair for key, pair in changed.items() if not _matches(key, HARMLESS)}
    notes = []
    if steps := changed.pop("train.steps", None):
        notes.append(_note_on_steps(steps, now, step))
    for key in [key for key in changed if _matches(key, INEXACT)]:
        was, is_now = changed.pop(key)
        notes.append(f"{key} was {was} and is {is_now}: no longer bit-identical to an undisturbed run")
    if changed:
        changes_text = ", ".join(f"{key} (was {was}, is {is_now})" for key, (was, is_now) in changed.items())
        raise RecipeError(
            next(iter(changed)) if len(changed) == 1 else "recipe",
            f"the run here was started with other settings: {changes_text}",
            mend="change them back, or start a new run: --resume never, or another --out",
        )
    return notes


def _note_on_steps(steps: tuple[int, int], now: Mapping[str, Any], step: int) -> str:
    was, is_now = steps
    if is_now < step:
        raise RecipeError("train.steps", f"{is_now}, but {step} steps are made already")
    schedule = now["optim"]["lr_schedule"]
    shape = (
        "" if schedule == "constant" else f"; the rate's {schedule} decay is stretched over the new length"
    )
    return f"train.steps was {was} and is {is_now}{shape}"


def check_environment(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What of the machine and the software changed: numbers then agree to rounding, not to the bit."""
    return [
        f"{key} was {was} and is {is_now}: no longer bit-identical to an undisturbed run"
        for key, (was, is_now) in differences(before, now).items()
    ]


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(key, pattern) for pattern in patterns)


def exactness(device: torch.device, precision: str, micro_batch: int, ranks: Ranks = ALONE) -> dict[str, Any]:
    """What decides the last bits of every number, to be compared when a run goes on."""
    versions = hardware.versions(("torch", "diffusers", "transformers", "numpy"))
    here = hardware.machine()
    return {
        "darkroom": darkroom.__version__,
        "threads": torch.get_num_threads(),
        "precision": precision,
        "micro_batch": micro_batch,
        "processes": ranks.size,
        "device": here.cpu if device.type == "cpu" else here.devices[device.index or 0].name,
        **versions,
    }
