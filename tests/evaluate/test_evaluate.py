"""The whole way: a model and prompts, or a folder, to rows of scores."""

from __future__ import annotations

import json

import numpy as np
import pytest
from makers import paint, small_extractor
from PIL import Image

from darkroom import models, sample
from darkroom.cli.application import main
from darkroom.data.importers import import_pictures
from darkroom.errors import InputError
from darkroom.evaluate import statistics
from darkroom.evaluate.extractors import open_extractor
from darkroom.evaluate.job import append_scores, evaluate, evaluate_folder, read_scores
from darkroom.evaluate.metrics import METRICS
from darkroom.evaluate.pictures import FolderPictures, Prompts, StorePictures, draw, images, open_pictures
from darkroom.evaluate.small import TrainingHashes
from darkroom.evaluate.statistics import unit

DRAWN = {"steps": 2, "guidance": 1.0}


def value_of(scores, metric):
    (found,) = [score for score in scores if score.metric == metric]
    return found.value


class Counting:
    """`sample.generate`, counting the pictures it makes."""

    def __init__(self, *, most=None):
        self.made, self.most = 0, most

    def __call__(self, model, prompts, **settings):
        if self.most is not None and self.made >= self.most:
            raise KeyboardInterrupt
        pictures = sample.generate(model, prompts, **settings)
        self.made += len(pictures)
        return pictures


# ---- folders


def test_a_set_against_itself_is_at_zero_and_noise_moves_it_away(painted, small_folder, tmp_path):
    extractors = {"all": open_extractor(small_folder)}
    names = ["fid", "kid", "cmmd"]

    def scored(folder):
        scores = evaluate_folder(folder, names, extractors=extractors, reference=painted, say=lambda _: None)
        return [score.value for score in scores]

    draws = np.random.default_rng(0)
    by_noise = []
    for strength in (0, 20, 80):
        folder = tmp_path / str(strength)
        folder.mkdir()
        for file in sorted(painted.iterdir()):
            pixels = np.asarray(Image.open(file), dtype=float)
            noisy = (pixels + strength * draws.standard_normal(pixels.shape)).clip(0, 255)
            Image.fromarray(noisy.astype(np.uint8)).save(folder / file.name)
        by_noise.append(scored(folder))
    for none, some, much in zip(*by_noise, strict=True):
        assert none < some < much
        assert none < much / 20
    assert by_noise[0][0] == pytest.approx(0, abs=1e-8)  # fid; the unbiased others lie below zero


def test_a_row_says_what_it_was_taken_with(painted, small_folder, tmp_path):
    notes = []
    (score,) = evaluate_folder(
        painted, ["fid"], extractors={"all": small_folder}, reference=painted, say=notes.append
    )
    assert (score.n, score.compared_n, score.better) == (24, 24, "lower")
    assert score.extractor_sha256 == open_extractor(small_folder).sha256
    assert score.compared_sha256 == score.model_sha256 == FolderPictures.of(painted).sha256
    assert score.low <= score.value <= score.high
    assert "24 pictures are under 2,048" in score.note
    assert "24 pictures are under 2,048" in notes[0]
    file = append_scores(tmp_path / "scores.csv", [score])
    append_scores(file, [score])
    again = read_scores(file)
    assert len(again) == 2
    assert again[0].settings == score.settings
    assert again[0].value == pytest.approx(score.value, rel=1e-8, abs=1e-12)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="no table of scores"):
        append_scores(tmp_path / "other.csv", [score])


def test_a_store_and_its_folder_are_the_same_reference(painted, small_folder, tmp_path):
    import_pictures(painted, tmp_path / "pictures.lance", on_missing_caption="keep")
    found = [
        evaluate_folder(
            painted, ["kid"], extractors={"all": small_folder}, reference=where, say=lambda _: None
        )
        for where in (painted, tmp_path / "pictures.lance")
    ]
    assert value_of(found[0], "kid") == pytest.approx(value_of(found[1], "kid"), abs=1e-12)
    assert found[1][0].compared.endswith("pictures.lance@2") or "@" in found[1][0].compared
    store = open_pictures(tmp_path / "pictures.lance", filter="width > 1000000 or width = 32", most=5)
    assert isinstance(store, StorePictures)
    assert len(store) == len(list(images(store))) == 5
    with pytest.raises(InputError, match="no pictures"):
        open_pictures(tmp_path / "pictures.lance", filter="width > 100")


def test_subject_fidelity_is_the_mean_cosine_over_all_pairs(painted, small_folder, tmp_path):
    subject = paint(tmp_path / "subject", 5, seed=9)
    found = open_extractor(small_folder)
    (subject / "000.mask.png").write_bytes((subject / "001.png").read_bytes())
    assert len(FolderPictures.of(subject)) == 5  # a mask is no photograph
    (score,) = evaluate_folder(painted, ["dino"], extractors={"dino": found}, subject=subject)
    drawn, real = (found.pictures(images(FolderPictures.of(folder))) for folder in (painted, subject))
    expected = statistics.cosine_to_set(drawn, real).mean()
    assert score.value == pytest.approx(expected, abs=1e-9)
    own = statistics.mean_cosine_within(real)
    assert score.settings["photographs_with_each_other"] == pytest.approx(own, abs=1e-6)
    (same,) = evaluate_folder(subject, ["dino"], extractors={"dino": found}, subject=subject)
    assert same.value > score.value


# ---- models


@pytest.fixture(scope="module")
def text_extractors(clip_folder, dino_folder):
    return {"clip": open_extractor(clip_folder), "dino": open_extractor(dino_folder)}


def test_a_model_is_scored_in_every_way(tiny, text_extractors, painted, tmp_path):
    other = models.create("tiny", seed=7)
    prompts = Prompts.of("two", ["a sks dog", "a red sks dog"], "sks")
    names = ["clip", "clip-t", "clip-i", "dino", "pres", "div", "drift", "cmmd"]
    subject = paint(tmp_path / "subject", 4, seed=2)
    scores = evaluate(
        tiny,
        prompts,
        names,
        generate=sample.generate,
        extractors=text_extractors,
        reference=painted,
        subject=subject,
        class_word="dog",
        base=other,
        num=3,
        class_num=4,
        settings=DRAWN,
        keep=tmp_path / "kept",
        say=lambda _: None,
    )
    assert [score.metric for score in scores] == names
    clip = text_extractors["clip"]
    files = sorted((tmp_path / "kept" / "pictures").glob("*.png"))
    features = clip.pictures(images(FolderPictures("", tuple(files))))
    texts = clip.texts(["a dog"] * 3 + ["a red dog"] * 3)
    cosines = statistics.cosine_of_pairs(features, texts)
    assert value_of(scores, "clip-t") == pytest.approx(cosines.mean(), abs=1e-6)
    assert value_of(scores, "clip") == pytest.approx(100 * cosines.clip(0).mean(), abs=1e-4)
    named = statistics.cosine_of_pairs(features, clip.texts(["a sks dog"] * 3 + ["a red sks dog"] * 3))
    assert abs(named.mean() - cosines.mean()) > 1e-4
    drift = next(score for score in scores if score.metric == "drift")
    assert drift.compared_sha256 == models.identity(*other.modules.values()) != drift.model_sha256
    assert drift.settings["class_prompt"] == "a photo of a dog"
    assert (drift.n, drift.compared_n) == (4, 4)
    assert drift.value > 1e-4


@pytest.mark.parametrize(("scheduler", "drawn_at"), [("LCMScheduler", 1.0), ("DDIMScheduler", 6.0)])
def test_a_distilled_model_is_drawn_without_guidance(text_extractors, scheduler, drawn_at):
    """As `generate` draws it, whatever scale its teacher noted; others by their own scale."""
    model = models.create("tiny", seed=3)
    model.scheduler, model.guidance = {**model.scheduler, "_class_name": scheduler}, 6.0
    seen = []

    def drawing(model, prompts, **settings):
        pictures = sample.generate(model, prompts, **settings)
        seen.extend(picture.parameters["guidance"] for picture in pictures)
        return pictures

    evaluate(
        model, ["a dog"], ["div"], generate=drawing, extractors=text_extractors, num=2, settings={"steps": 2}
    )
    assert set(seen) == {drawn_at}


def test_a_model_that_did_not_move_has_no_drift(tiny, text_extractors):
    (score,) = evaluate(
        tiny,
        [],
        ["drift"],
        generate=(counting := Counting()),
        extractors=text_extractors,
        class_word="dog",
        base=tiny,
        num=1,
        class_num=3,
        settings=DRAWN,
    )
    assert score.value == pytest.approx(0, abs=1e-9)
    assert counting.made == 6  # of the class alone


def test_pictures_are_those_of_one_call_of_generate(tiny, tmp_path):
    prompts = ["a dog", "a cat"]
    found = draw(
        sample.generate, tiny, prompts, folder=tmp_path / "a", model_sha256="x", num=2, seed=5, settings=DRAWN
    )
    whole = sample.generate(tiny, prompts, seed=5, num=2, **DRAWN)
    for image, picture in zip(images(found), whole, strict=True):
        off = np.abs(np.asarray(image, int) - np.asarray(picture.image, int)).max()
        assert off <= 1
    assert np.abs(np.asarray(whole[0].image, int) - np.asarray(whole[2].image, int)).max() >= 10
    assert sample.read_parameters(found.files[2])["prompt"] == "a cat"


def test_drawing_goes_on_where_it_was_interrupted(tiny, tmp_path):
    told = {"folder": tmp_path / "kept", "model_sha256": "x", "settings": DRAWN}
    prompts = [f"a dog, {i}" for i in range(10)]
    stopped = Counting(most=16)
    with pytest.raises(KeyboardInterrupt):
        draw(stopped, tiny, prompts, num=2, **told)
    rest = Counting()
    found = draw(rest, tiny, prompts, num=2, **told)
    assert (stopped.made, rest.made, len(found)) == (16, 4, 20)
    bytes_before = list(found.bytes())
    found.files[3].unlink()
    again = Counting()
    mended = draw(again, tiny, prompts, num=2, **told)
    assert again.made == 1
    off = [
        np.abs(np.asarray(a, int) - np.asarray(Image.open(b), int)).max()
        for a, b in zip(images(mended), found.files, strict=True)
    ]
    assert max(off) == 0
    assert sum(a != b for a, b in zip(bytes_before, mended.bytes(), strict=True)) <= 1


def test_pictures_of_other_settings_are_not_taken_for_these(tiny, tmp_path):
    told = {"folder": tmp_path / "kept", "model_sha256": "x"}
    draw(sample.generate, tiny, ["a dog"], settings=DRAWN, **told)
    with pytest.raises(InputError, match="steps 2, not 3"):
        draw(sample.generate, tiny, ["a dog"], settings=DRAWN | {"steps": 3}, **told)
    with pytest.raises(InputError, match="model_sha256 x, not y"):
        draw(sample.generate, tiny, ["a dog"], settings=DRAWN, **(told | {"model_sha256": "y"}))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("hello")
    with pytest.raises(InputError, match="something else"):
        draw(sample.generate, tiny, ["a dog"], folder=tmp_path / "mine", model_sha256="x")


def test_everything_is_checked_before_a_picture_is_drawn(tiny, small_folder, dino_folder, painted):
    never = Counting(most=0)

    def told(metrics, **more):
        with pytest.raises(InputError) as caught:
            evaluate(tiny, ["a dog"], metrics, generate=never, **more)
        return str(caught.value)

    assert "allowed: fid" in told(["fit"])
    assert "add --reference" in told(["fid"], extractors={"all": small_folder})
    assert "add --base" in told(["drift"], class_word="dog", extractors={"all": small_folder})
    assert "add --subject" in told(["dino"], extractors={"all": small_folder})
    assert "no inception extractor" in told(["fid"], reference=painted)
    assert "reads no text" in told(["clip-t"], extractors={"clip": dino_folder})
    assert "no folder" in told(["dino"], subject="nowhere", extractors={"all": small_folder})
    assert "2 or more" in told(["div"], num=1, extractors={"all": small_folder})
    assert never.made == 0


# ---- what an extractor has seen


def test_an_extractor_does_not_judge_pictures_it_was_trained_on(painted, tmp_path):
    subject = paint(tmp_path / "subject", 4, seed=5, side=64)
    looked = TrainingHashes.of((file.read_bytes(), 7) for file in sorted(subject.iterdir())[:2])
    flattering = small_extractor(tmp_path / "flattering", seen=looked)
    with pytest.raises(InputError, match=r"trained on 2 of 4 pictures \(2 the same files\)"):
        evaluate_folder(painted, ["dino"], extractors={"all": flattering}, subject=subject)
    (score,) = evaluate_folder(
        painted,
        ["dino"],
        extractors={"all": flattering},
        subject=subject,
        allow_seen=True,
        say=lambda _: None,
    )
    assert "trained on 2 of 4" in score.note
    other = paint(tmp_path / "other", 4, seed=6, side=64)
    (fair,) = evaluate_folder(painted, ["dino"], extractors={"all": flattering}, subject=other)
    assert fair.note == ""


def test_a_picture_saved_anew_is_recognised_by_its_looks(painted, tmp_path):
    import_pictures(painted, tmp_path / "pictures.lance", on_missing_caption="keep")
    store = open_pictures(tmp_path / "pictures.lance")
    seen = TrainingHashes.of(zip(store.column("picture"), store.column("phash"), strict=True))
    again = tmp_path / "again"
    again.mkdir()
    for file in sorted(painted.iterdir()):
        Image.open(file).save(again / file.name, compress_level=1)
    found = seen.overlap(FolderPictures.of(again))
    assert (found.exact, found.alike, found.of) == (0, 24, 24)
    assert not seen.overlap(FolderPictures.of(paint(tmp_path / "new", 12, seed=77)))


# ---- the command line


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return caught.value.code, out, err


def test_a_folders_prompts_lie_beside_its_pictures(small_folder, tmp_path, capsys):
    """Texts beside pictures, or metadata.jsonl, as import reads them; without a prompt it is refused."""
    folder = paint(tmp_path / "plain", 4, seed=5)
    told = ["a red dog", "a cat at night", "a red dog", "grass"]
    arguments = ["--extractor", small_folder, "--metrics", "clip,clip-t", "--json"]

    def scored(folder):
        code, out, err = run(capsys, "evaluate", folder, *arguments)
        assert code == 0, err
        return [row["value"] for row in json.loads(out)]

    code, _, err = run(capsys, "evaluate", folder, *arguments)
    assert code == 2
    assert "4 of 4 pictures do not say their prompt, such as '000.png'" in err
    found = {}
    for layout, prompts in {"txt": told, "jsonl": told, "nested": told, "others": told[::-1]}.items():
        copy = paint(tmp_path / layout / ("inside" if layout == "nested" else ""), 4, seed=5)
        if layout == "txt":
            for i, text in enumerate(prompts):
                (copy / f"{i:03d}.txt").write_text(f"{text}\n")
        else:
            inside = "inside/" if layout == "nested" else ""
            lines = [
                json.dumps({"file_name": f"{inside}{i:03d}.png", "text": text})
                for i, text in enumerate(prompts)
            ]
            lines.append(json.dumps({"file_name": "gone.png", "text": "left out"}))
            (tmp_path / layout / "metadata.jsonl").write_text("\n".join(lines))
        found[layout] = scored(tmp_path / layout)
    assert found["txt"] == found["jsonl"] == found["nested"]
    assert found["others"][1] != pytest.approx(found["txt"][1], rel=1e-3)
    extractor = open_extractor(small_folder)
    pictures = unit(extractor.pictures(list(images(FolderPictures.of(folder)))))
    expected = (pictures * unit(extractor.texts(told))).sum(axis=1)
    assert found["txt"][1] == pytest.approx(expected.mean(), rel=1e-6)
    (tmp_path / "txt/002.txt").unlink()
    code, _, err = run(capsys, "evaluate", tmp_path / "txt", *arguments)
    assert code == 2
    assert "1 of 4 pictures do not say their prompt, such as '002.png'" in err


def test_fid_infinity_of_a_set_with_itself_is_not_to_be_told_from_zero(small_folder, tmp_path):
    """The line lands below zero, where no distance is; another set is told apart."""
    pictures = paint(tmp_path / "one", 80, seed=1, side=16)
    other = tmp_path / "other"
    other.mkdir()
    for file in sorted(paint(tmp_path / "two", 80, seed=2, side=16).iterdir()):
        Image.fromarray(np.asarray(Image.open(file)) // 4).save(other / file.name)

    def scored(reference):
        return evaluate_folder(
            pictures,
            ["fid-infinity"],
            extractors={"all": small_folder},
            reference=reference,
            say=lambda _: None,
        )[0]

    same, apart = scored(pictures), scored(other)
    assert same.value == 0 == same.low
    assert same.settings["line_at_zero"] < 0
    assert same.high >= -same.settings["line_at_zero"] - 1e-6
    assert "which no distance is: 0 is written; indistinguishable from 0" in same.note
    assert "80 pictures are in both sets" in same.note
    assert apart.low > 0
    assert "not to be told" not in apart.note
    assert "in both sets" not in apart.note


def test_kernel_distances_of_a_set_with_itself_say_why_they_are_below_zero(small_folder, tmp_path):
    """The estimate without bias is below zero there, and all of its interval may be."""
    pictures = paint(tmp_path / "one", 24, seed=1, side=16)
    alike = paint(tmp_path / "two", 24, seed=2, side=16)
    other = tmp_path / "other"
    other.mkdir()
    for file in sorted(alike.iterdir()):
        Image.fromarray(np.asarray(Image.open(file)) // 4).save(other / file.name)

    def scored(reference):
        extractors = {"all": small_folder}
        return evaluate_folder(
            pictures, ["kid", "cmmd"], extractors=extractors, reference=reference, say=lambda _: None
        )

    for same, near, apart in zip(scored(pictures), scored(alike), scored(other), strict=True):
        assert same.value < 0
        assert "24 pictures are in both sets" in same.note
        assert "in both sets" not in near.note
        assert ("indistinguishable from 0" in near.note) == (near.low <= 0)
        assert apart.low > 0
        assert "both sets" not in apart.note
        assert "indistinguishable" not in apart.note


def test_the_verb_scores_a_model_and_then_its_pictures(
    tiny, small_folder, painted, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    models.save(tiny, tmp_path / "model")
    common = ["--reference", painted, "--extractor", small_folder, "--metrics", "fid,clip-t", "--json"]
    (tmp_path / "toys.txt").write_text("a {token} {class} in snow\na red {token} {class}\na wet {class}\n")
    arguments = ["--prompts", "toys.txt", "--class-word", "toy", "--token", "sks"]
    arguments += ["--num-prompts", 2, "--num", 2]
    arguments += ["--steps", 2, "--keep-pictures", "kept", "--out", "scores.csv"]
    code, out, err = run(capsys, "evaluate", "model", *common, *arguments)
    assert code == 0, err
    by_model = {row["metric"]: row for row in json.loads(out)}
    assert by_model["fid"]["n"] == 4
    assert by_model["clip-t"]["prompts"] == "toys.txt"
    assert len(read_scores("scores.csv")) == 2
    code, out, err = run(capsys, "evaluate", "kept/pictures", *common, "--token", "sks")
    assert code == 0, err
    for row in json.loads(out):
        assert row["value"] == pytest.approx(by_model[row["metric"]]["value"], rel=1e-9)
    code, out, err = run(capsys, "evaluate", "kept/pictures", *common)
    with_token = next(row for row in json.loads(out) if row["metric"] == "clip-t")
    assert with_token["value"] != pytest.approx(by_model["clip-t"]["value"], rel=1e-6)


def test_a_runs_folder_stands_for_its_model(tiny, small_folder, tmp_path, capsys):
    run_folder = tmp_path / "run"
    models.save(tiny, run_folder / "model")
    (run_folder / "recipe.yaml").write_text("task: pretrain\n")
    arguments = ["--metrics", "drift", "--class-word", "dog", "--base", run_folder / "model", "--steps", 2]
    arguments += ["--class-num", 2, "--extractor", small_folder, "--json"]
    code, out, err = run(capsys, "evaluate", run_folder, *arguments)
    assert code == 0, err
    (row,) = json.loads(out)
    assert row["value"] == pytest.approx(0, abs=1e-9)
    assert row["model"] == str(run_folder / "model")
    (tmp_path / "lora").mkdir()
    for name in ("recipe.yaml", "adapter.safetensors"):
        (tmp_path / "lora" / name).write_text("")
    code, out, err = run(capsys, "evaluate", tmp_path / "lora", *arguments)
    assert (code, out) == (2, "")
    assert "--adapter NAME=" in err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--metrics", "drift", "--out", "/dev/null/scores.csv"], "cannot be written"),
        (["--metrics", "nice"], "allowed: fid"),
        (["--metrics", "fid", "--extractor", "eye=x"], "allowed: dino, clip, inception, coca, all"),
        (["--metrics", "fid", "--extractor", "all="], "each NAME once"),
        (["--metrics", "fid", "--adapter", "x"], "add --prompts"),
        (["--metrics", "dino", "--extractor", "nowhere"], "no extractor at 'nowhere'"),
        (["--metrics", "clip", "--prompts", "nowhere.txt"], "no prompts at 'nowhere.txt'"),
    ],
)
def test_a_mistake_is_told_in_one_line(arguments, told, capsys, tmp_path):
    written = tmp_path / "prompts.txt"
    written.write_text("a dog")
    prompts = [] if "--adapter" in arguments else ["--prompts", str(written)]
    code, out, err = run(capsys, "evaluate", "tiny", *prompts, *arguments)
    assert (code, out) == (2, "")
    assert told in err
    assert len(err.strip().splitlines()) == 1


def test_every_metric_is_told_in_the_help(capsys):
    code, out, _ = run(capsys, "evaluate", "--help")
    assert code == 0
    assert all(name in " ".join(out.split()) for name in METRICS)
