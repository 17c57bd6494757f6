"""Serving planned from a trace: more or heavier requests need more cards, and wrong lines are named."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from darkroom.cli.application import main
from darkroom.errors import InputError
from darkroom.hardware.cards import cards, find_card
from darkroom.measure.pipeline_server import draw_trace
from darkroom.plan import targets
from darkroom.plan.jobs import Where
from darkroom.plan.roofline import Software
from darkroom.plan.serving import Fleet, Request, Server, draw, fewest_devices, read_trace, serve
from darkroom.plan.trace import ServingTarget, plan_rate, plan_trace

SIZES = [(64, 64), (64, 48)]


@pytest.fixture(scope="module")
def profiles():
    return {size: targets.picture_profile("tiny", *size, False, "bf16", "fused") for size in SIZES}


@pytest.fixture
def file(tmp_path):
    """What `bench serve` asks for, a request a line."""
    path = tmp_path / "trace.jsonl"
    drawn = draw_trace(60, seed=0, sizes=SIZES)
    path.write_text("\n".join(json.dumps(asked.plain()) for asked in drawn) + "\n")
    return path


def server_of(profiles, precision="fp16"):
    return Server(profiles, Where(cards()["T4"]), Software(precision))


def told(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_:
        main(["plan", "serve", "--model", "tiny", "--gpu", "T4", *map(str, arguments)])
    out, err = capsys.readouterr()
    return exit_.value.code, out, err


def test_a_request_alone_takes_its_text_steps_and_decoding(profiles, file):
    server, request = server_of(profiles), read_trace(file)[0]
    alone = serve([request], server, 1)
    seconds = server.seconds("text", request.size, 2) + server.seconds("decode", request.size, 1)
    seconds += request.steps * server.seconds("denoise", request.size, request.rows)
    assert alone.p95_s == pytest.approx(seconds)
    assert alone.busy == pytest.approx(seconds / (request.at + seconds))


def test_denser_requests_need_more_cards_and_all_keep_the_goal(profiles, file):
    server = server_of(profiles)
    goal = 1.5 * max(serve([request], server, 1).p95_s for request in read_trace(file))
    needed = []
    for rate in (1, 20, 200):
        requests = read_trace(file, rate)
        found = fewest_devices(requests, server, goal)
        assert found.p95_s <= goal
        assert found.devices == 1 or serve(requests, server, found.devices - 1).p95_s > goal
        needed.append(found.devices)
    assert needed == sorted(needed)
    assert needed[-1] > needed[0]


def test_steps_and_guidance_are_the_requests_own(profiles, file):
    requests = read_trace(file, 20)
    heavy = [replace(request, steps=3 * request.steps, guidance=7.5) for request in requests]
    where = Where(cards()["T4"])
    light_plan, heavy_plan = (
        plan_trace(asked, ServingTarget(1e3), profiles, where, Software("fp16"))
        for asked in (requests, heavy)
    )
    assert heavy_plan.flops_an_image > 2.5 * light_plan.flops_an_image
    assert heavy_plan.extra["busy"] > light_plan.extra["busy"]
    assert heavy_plan.images_per_s == light_plan.images_per_s == pytest.approx(60 / requests[-1].at)


def test_the_verb_plans_a_trace(capsys, file):
    code, out, err = told(capsys, "--trace", file, "--rate", 5, "--json")
    assert code == 0, err
    plan = json.loads(out)["plans"][0]
    assert plan["fits"]
    assert plan["extra"]["latency_p95_s"] <= 10
    assert any("60 requests" in note and "64x48, 64x64" in note for note in plan["notes"])
    code, out, _ = told(capsys, "--trace", file, "--latency", 1e-6)
    assert "does NOT fit" in out
    assert "out of reach" in out


@pytest.mark.parametrize("card", ["T4", "A100-80", "H100"])
@pytest.mark.parametrize("pictures_meanwhile", [2, 100, 400])
def test_a_rate_and_its_own_trace_agree(profiles, card, pictures_meanwhile):
    """One rule: a trace drawn at a rate, long or shorter than the goal, needs what the rate is said to."""
    profile, request = profiles[64, 64], Request(0.0, 64, 64, 30, 7.5)
    where, software = Where(find_card(card)), Software("fp16")
    alone = serve([request], Server({request.size: profile}, where, software), 1).p95_s
    rate = pictures_meanwhile / alone  # asked for while one alone is made
    planned = plan_rate(request, ServingTarget(3 * alone, rate), profile, where, software)
    low, high = planned.intervals["devices"]

    def needed(times, number, seed):
        """Devices for a trace of so many times the rate."""
        drawn = draw(request, times * rate, number, seed)
        goal = ServingTarget(3 * alone)
        return plan_trace(drawn, goal, {request.size: profile}, where, software).extra["devices"]

    for seed, number in enumerate((400, 400, 1500), 100):  # not the seeds that the rate draws
        assert low <= needed(1, number, seed) <= high
    assert low <= planned.extra["devices"] <= high
    if planned.extra["devices"] > 1:  # the control: three times the rate is another answer
        assert needed(3, 400, 100) > high
    latencies = [planned.extra[f"latency_{name}_s"] for name in ("p50", "p95", "p99")]
    assert latencies == sorted(latencies)
    assert latencies[1] <= 3 * alone
    again = plan_rate(request, ServingTarget(3 * alone, rate), profile, where, software)
    assert again == planned  # seeded


def test_a_trace_that_ends_before_its_queue_has_grown_says_so(profiles):
    """What is planned is an hour like it; the devices that do for the trace alone are named beside."""
    request, server = Request(0.0, 64, 64, 30, 7.5), server_of(profiles)
    alone = serve([request], server, 1).p95_s
    short = draw(request, 400 / alone, 600, 0)  # one and a half times as long as one picture takes
    goal = ServingTarget(3 * alone)
    fewest = fewest_devices(short, server, goal.latency_s).devices
    plan = plan_trace(short, goal, profiles, Where(cards()["T4"]), Software("fp16"))
    assert plan.extra["devices"] > fewest
    assert plan.extra["busy"] < 1
    (note,) = [note for note in plan.notes if "the trace alone" in note]
    assert f" on {fewest}, " in note
    assert note.endswith(f"need {plan.extra['devices']}")
    at_once = [replace(one, at=0.0) for one in short]  # no rate: served as they are
    whole = plan_trace(at_once, goal, profiles, Where(cards()["T4"]), Software("fp16"))
    assert whole.extra["devices"] == fewest_devices(at_once, server, goal.latency_s).devices
    assert not any("the trace alone" in note for note in whole.notes)


def test_lost_devices_finish_every_request_later(profiles):
    server, request = server_of(profiles), Request(0.0, 64, 64, 30, 7.5)
    alone = serve([request], server, 1).p95_s
    requests = draw(request, 3 / alone, 300, 0)
    plain = serve(requests, server, 4)
    assert serve(requests, server, 4, Fleet()) == plain
    assert plain.losses == 0
    assert plain.on == pytest.approx(4)
    often = serve(requests, server, 4, Fleet(start_s=5 * alone, losses_per_hour=3600 / (20 * alone)))
    assert often.losses > 3
    assert often.p99_s > plain.p99_s
    assert often.p50_s >= plain.p50_s


def test_an_autoscaler_costs_less_and_answers_later(profiles):
    server, request = server_of(profiles), Request(0.0, 64, 64, 30, 7.5)
    alone = serve([request], server, 1).p95_s
    burst = [
        replace(one, at=one.at + (i > 150) * 2000 * alone)
        for i, one in enumerate(draw(request, 40 / alone, 300, 0))
    ]
    fleet = Fleet(start_s=20 * alone, least=1, jobs_each=4, up_s=alone, down_s=10 * alone)
    always, scaled = serve(burst, server, 8), serve(burst, server, 8, fleet)
    assert always.on == pytest.approx(8)
    assert scaled.on < 2
    assert scaled.p95_s > always.p95_s
    at_once = serve(burst, server, 8, replace(fleet, start_s=0.0))
    assert at_once.p95_s <= scaled.p95_s


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ('{"at": 0.5}', "line 2"),
        ('{"at": 1, "width": 64, "height": 64, "steps": 0, "guidance": 1}', "line 2"),
        ('{"at": NaN, "width": 64, "height": 64, "steps": 9, "guidance": 1}', "line 2"),
        ("[1, 2]", "line 2"),
        (None, "no requests"),
    ],
)
def test_a_wrong_line_is_named(capsys, tmp_path, line, word):
    path = tmp_path / "trace.jsonl"
    good = '{"at": 0, "width": 64, "height": 64, "steps": 9, "guidance": 1}'
    path.write_text("" if line is None else f"{good}\n{line}\n")
    code, _, err = told(capsys, "--trace", path)
    assert code == 2
    assert word in err
    assert len(err.strip().splitlines()) == 1
    code, _, err = told(capsys, "--trace", tmp_path / "none.jsonl")
    assert code == 2


@pytest.mark.parametrize(
    "line", ["[" * 50_000, '{"at": 0, "width": 1e999, "height": 8, "steps": 1, "guidance": 1}', "5", "null"]
)
def test_a_line_of_a_trace_that_is_no_request_is_named(tmp_path, line):
    whole = '{"at": 0, "width": 8, "height": 8, "steps": 1, "guidance": 1}'
    (tmp_path / "trace.jsonl").write_text(f"{whole}\n{line}\n")
    with pytest.raises(InputError, match="trace.jsonl, line 2"):
        read_trace(tmp_path / "trace.jsonl")
    (tmp_path / "trace.jsonl").write_text(f"{whole}\n{whole}\n")
    assert len(read_trace(tmp_path / "trace.jsonl")) == 2
