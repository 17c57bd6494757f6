"""Nets of a server: jobs that are kept with their pictures, memory, and what does not go together."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from darkroom import sample
from darkroom.errors import InputError
from darkroom.sample import Control
from darkroom.serve.engine.runner import shape_of
from darkroom.serve.engine.tickets import png_of
from darkroom.serve.jobs.admission import check_load, digest_of
from darkroom.serve.jobs.core import Core
from darkroom.serve.jobs.results import PROBE_START
from darkroom.serve.request import ControlChoice, ControlUpload, PictureRequest, Refused, Uploads
from serve.conftest import difference
from serve.nets import steering, write_nets

STEERED = PictureRequest(
    prompt="a horse", steps=60, seed=5, guidance=3.0, solver="euler", controls=(ControlChoice(net="edges"),)
)


@pytest.fixture(scope="module")
def nets(small, tmp_path_factory) -> Path:
    """A folder of nets."""
    folder = tmp_path_factory.mktemp("nets")
    write_nets(folder, small, small)
    return folder


def files_of(core: Core) -> list[str]:
    """Of all jobs; the server's own probe of the disk comes and goes."""
    folder = core.results.folder
    assert folder is not None
    return sorted(path.name for path in folder.glob("*/*/*") if not path.parent.name.startswith(PROBE_START))


def test_a_kept_job_is_drawn_with_its_controls_after_a_restart(run_core, small, nets):
    uploads = Uploads(controls=(ControlUpload(png_of(steering(9))),))

    async def accept(core: Core) -> list[str]:
        job = await core.submit(STEERED, key="a", job_id="x", uploads=uploads)
        names = files_of(core)
        core._defer_all()
        assert core._keeper.read_uploads(job.uid) == uploads
        return names

    async def finish(core: Core) -> Any:
        while not (job := await core.get("x", key="a")).over:
            await asyncio.sleep(0.02)
        files = files_of(core)
        [picture] = await core.pictures("x", key="a")
        assert core.engine is not None
        assert core.engine.nets is not None
        return job.state, files, picture.png, core.engine.nets.bytes, dict(core.engine.nets._users)

    assert run_core(accept, controls=nets) == ["control0.upload"]
    state, files, png, in_memory, users = run_core(finish, controls=nets)
    assert (state, files, users) == ("done", ["0.png"], {})
    assert in_memory > 0
    told = {"steps": 60, "seed": 5, "guidance": 3.0, "solver": "euler", "optimise": "none"}
    lone, plain = (
        sample.generate(small, "a horse", controls=some, notice=lambda _: None, **told)[0].image
        for some in ([Control(nets / "edges", steering(9))], [])
    )
    made = Image.open(io.BytesIO(png))
    assert difference(made, lone) <= 2
    assert difference(made, plain) >= 4


def test_nets_that_do_not_fit_together_take_turns_and_a_cancelled_one_leaves(run_core, nets):
    def uploads(i: int) -> Uploads:
        return Uploads(controls=(ControlUpload(png_of(steering(i))),))

    async def scenario(core: Core) -> Any:
        assert core.engine is not None
        room = core.engine.nets
        assert room is not None
        most = 0
        for i in range(9):
            choice = ControlChoice(net=("edges", "depth", "pose")[i % 3])
            wanted = STEERED.model_copy(update={"controls": (choice,), "steps": 12, "seed": i})
            await core.submit(wanted, key="a", job_id=f"x{i}", uploads=uploads(i))
        await core.cancel("x4", key="a")
        while not all([(await core.get(f"x{i}", key="a")).over for i in range(9)]):
            most = max(most, room.bytes)
            await asyncio.sleep(0.005)
        states = [(await core.get(f"x{i}", key="a")).state for i in range(9)]
        return states, most, dict(room._users), core.engine.load

    needs = sum(file.stat().st_size for file in (nets / "edges").glob("*.safetensors"))
    states, most, users, load = run_core(scenario, controls=nets, control_memory=int(1.2 * needs))
    assert states[:4] + states[5:] == ["done"] * 8
    assert states[4] in ("cancelled", "done")
    assert 0 < most <= 1.2 * needs
    assert (users, load) == ({}, 0.0)


def test_a_net_counts_half_an_evaluation(small):
    plain = STEERED.model_copy(update={"controls": ()})
    two = STEERED.model_copy(update={"controls": STEERED.controls * 2})
    loads = [shape_of(small, one).load(small.sample_size**2) for one in (plain, STEERED, two)]
    assert loads == [2.0, 3.0, 4.0]


def test_prompts_joined_by_and_are_an_evaluation_each(small):
    told = {"controls": (), "weighting": "a1111", "guidance": 1.0}
    for prompt, load in (("a horse", 1.0), ("a horse AND a dog", 3.0), ("a AND b :0.5 AND c", 4.0)):
        asked = STEERED.model_copy(update={**told, "prompt": prompt})
        assert shape_of(small, asked).load(small.sample_size**2) == load
    plain = STEERED.model_copy(update={**told, "prompt": "a AND b", "weighting": "none", "guidance": 3.0})
    assert shape_of(small, plain).load(small.sample_size**2) == 2.0
    many = STEERED.model_copy(update={**told, "prompt": " AND ".join("abcdefghijklmno")})
    with pytest.raises(Refused, match="too large.* pixels with 15 prompts joined by AND"):
        check_load(small, shape_of(small, many), 8.0)


def test_digests_of_kept_jobs_stay_and_pictures_of_controls_count():
    plain = PictureRequest(prompt="a horse", steps=4, seed=1)
    assert digest_of(plain, None) == "ba498ef75e533c5dddae9ab09366e914bd63640dcf1a991a46caf04fc4096a52"
    assert (
        digest_of(plain, Uploads(b"a", b"b"))
        == "67d1abb67016b625fa4304dc2db9a564ea34a22e899b84f676307a64abc597f7"
    )
    steered = plain.model_copy(update={"controls": (ControlChoice(net="edges"),)})
    pictures = [
        (),
        (ControlUpload(b"a"),),
        (ControlUpload(b"b"),),
        (ControlUpload(b"a", b"b"),),
        (ControlUpload(b"a"), ControlUpload(b"b")),
    ]
    digests = {digest_of(steered, Uploads(controls=some)) for some in pictures}
    assert len({digest_of(plain, None), digest_of(steered, None)} | digests) == 7


def test_what_cannot_have_nets_is_refused_at_the_start(run_core, nets):
    async def error(core: Core) -> Any:
        await core.loaded()
        return core.error

    for settings, named in (
        ({"controls": nets, "deterministic": True}, "--deterministic"),
        ({"control_memory": 10**6}, "--control-memory"),
        ({"controls": nets / "nowhere"}, "no folder"),
        ({"controls": nets, "optimise": "feature_cache"}, "feature_cache"),
    ):
        told = run_core(error, wait=False, **settings)
        assert isinstance(told, InputError)
        assert named in str(told)
