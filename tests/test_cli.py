"""The command line: exit codes, one-line mistakes, help with an example, JSON."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import pytest
import typer
from PIL import Image
from pydantic import BaseModel, Field
from typer.testing import CliRunner

from darkroom import cli, errors
from darkroom.cli import application
from darkroom.cli.groups import DRAWING, OptionsOf, grouped
from darkroom.errors import InputError

ROOT = Path(__file__).resolve().parents[1]
VERBS = [name for name in (command.name for command in cli.app.registered_commands) if name]
VERBS += [command.callback.__name__ for command in cli.app.registered_commands if not command.name]


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(list(arguments))
    told = capsys.readouterr()
    return left.value.code or 0, told.out, told.err


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(verb, capsys):
    code, out, _ = run(capsys, verb, "--help")
    assert code == 0
    assert f"Example: darkroom {verb}" in out


def test_import_and_loader_are_measured_at_a_size_of_ones_own(capsys):
    asked = ["--pictures", "12", "--size", "16", "--format", "jpeg", "--repeats", "5", "--json"]
    code, out, _ = run(capsys, "bench", "import", *asked)
    assert code == 0
    told = [row["settings"] for row in json.loads(out)]
    assert [settings["pictures"] for settings in told] == [12, 12, 48]
    assert {(settings["size"], settings["format"]) for settings in told} == {(16, "JPEG")}
    asked = ["--rows", "64", "--batch", "8", "--repeats", "5", "--json"]
    code, out, _ = run(capsys, "bench", "loader", *asked)
    assert code == 0
    assert {(row["settings"]["rows"], row["settings"]["batch"]) for row in json.loads(out)} == {(64, 8)}
    code, _, err = run(capsys, "bench", "import", "--format", "gif")
    assert code == 2
    assert "--format gif; allowed: JPEG, PNG, WEBP" in err


@pytest.mark.parametrize("verb", ["train", "loader", "import"])
def test_every_benchmark_has_help_with_an_example(verb, capsys):
    code, out, _ = run(capsys, "bench", verb, "--help")
    assert code == 0
    assert f"Example: darkroom bench {verb}" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["develop"], "No such command 'develop'"),
        (["generate", "--sed", "1"], "No such option: --sed"),
        (["generate", "nowhere", "a dog"], "no model at 'nowhere'"),
        (["generate", "tiny", "a dog", "--size", "big"], "allowed: WIDTHxHEIGHT"),
        (["generate", "tiny", "a dog", "--solver", "eular"], "eular"),
        (["generate", "tiny", "a dog", "--size", "33x32"], "multiples of"),
        (["generate", "tiny", "a dog", "--precision", "fp16"], "fp16 on a CPU"),
        (["generate", "tiny", "a dog", "--precision", "fp8"], "allowed: float32, bf16, fp16"),
        (["generate", "tiny", "a dog", "--device", "tpu9"], "device 'tpu9'"),
        (["train", "nowhere.yaml"], "no such recipe file"),
        (["train", "recipes:emojy"], "recipes:emojy: no such recipe; allowed: autoencoder, "),
        (["import", "nowhere", "store.lance"], "nowhere"),
        (["report", "folder"], "'folder': neither a run, a CSV nor pictures; allowed: run folders, CSVs"),
        (["report", "spoiled"], "'spoiled/a.png' is no picture that can be read"),
        (["verify", "spoiled/a.png"], "'spoiled/a.png': no picture that can be read"),
        (["bench", "likeness", "spoiled", "spoiled"], "picture 0 of spoiled cannot be read"),
        (["report", "a.png", "--out", "a.png"], "'a.png' is there already, and is no report"),
        (["report", "a.png", "--out", "folder"], "Invalid value for '--out': file 'folder' is a directory."),
        (["report", "a.png", "--out", "a.png/report.html"], "'a.png' is there already; choose another name"),
        (["inspect", "folder"], "'folder' is no model folder; it should hold unet, vae"),
        (["runs", "compare", "folder", "folder"], "no run at 'folder'"),
        (["train", "folder"], "folder: no such recipe file"),
        (["inspect", "mine"], "'mine/recipe.yaml' is no recipe of a run; a run's recipe has every key"),
        (["runs", "--root", "mine"], "'mine/recipe.yaml' is no recipe of a run"),
        (["export", "mine", "--to", "out"], "model: missing; and 1 more in the recipe of 'mine'"),
        (["push", "mine", "me/x"], "model: missing; and 1 more in the recipe of 'mine'"),
        (["inspect", "broken"], "'broken/recipe.yaml' is no recipe of a run"),
        (["inspect", "deep"], "'deep/recipe.yaml' is no recipe of a run"),
        (["runs", "--root", "deep"], "'deep/recipe.yaml' is no recipe of a run"),
        (["inspect", "nowhere"], "no model at 'nowhere'"),
        (["inspect", "nowhere.lance"], "nowhere.lance"),
        (["prepare", "nowhere.lance", "--model", "tiny"], "nowhere.lance"),
        (["report", "nowhere"], "nowhere"),
        (["runs", "compare", "a"], "allowed: runs, or runs compare RUN RUN"),
        (["export", "nowhere", "--to", "model"], "nowhere"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder, text in {
        "folder": None,
        "mine": "task: pretrain\n",
        "broken": "task: [\xe9",
        "deep": "[" * 50_000,
    }.items():
        Path(folder).mkdir()
        if text is not None:
            Path(folder, "recipe.yaml").write_text(text, encoding="latin-1")
    Image.new("RGB", (8, 8)).save("a.png")
    Path("spoiled").mkdir()
    # Pillow reads this by running Ghostscript, were it allowed to.
    Path("spoiled/a.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n")
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert list(Path().glob(".*")) == []
    assert message in err
    assert err.startswith("darkroom: ")
    assert err.count("\n") == 1
    assert out == ""


def test_a_shipped_recipe_is_found_by_its_name(tmp_path, monkeypatch):
    from darkroom.cli.application import recipe_file

    assert recipe_file(Path("recipes:emoji")) == ROOT / "recipes" / "emoji.yaml"
    assert recipe_file(Path("recipes/emoji.yaml")) == Path("recipes/emoji.yaml")
    assert recipe_file(None) is None
    # As a wheel leaves them: the package in one folder, the recipes under the environment's own.
    monkeypatch.setattr(
        "darkroom.__file__", str(tmp_path / "lib" / "site-packages" / "darkroom" / "__init__.py")
    )
    monkeypatch.setattr("sysconfig.get_path", lambda name, scheme: str(tmp_path))
    with pytest.raises(errors.RecipeError, match="no recipes came with this installation"):
        recipe_file(Path("recipes:emoji"))
    (tmp_path / "share" / "darkroom" / "recipes").mkdir(parents=True)
    (tmp_path / "share" / "darkroom" / "recipes" / "emoji.yaml").touch()
    assert recipe_file(Path("recipes:emoji")) == tmp_path / "share" / "darkroom" / "recipes" / "emoji.yaml"


def test_nothing_said_shows_the_help(capsys):
    code, out, _ = run(capsys)
    assert code == 2
    assert "Usage: darkroom" in out


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError(), "no memory left"),
        (OSError(28, "No space left on device", "a/b"), "No space left on device: a/b"),
        (
            OSError("LanceError(IO): No space left on device (os error 28)"),
            "the machine failed: LanceError(IO): ",
        ),
    ],
)
def test_a_machine_that_fails_is_one_line_and_exit_code_1(capsys, monkeypatch, error, told):
    from importlib import import_module

    def fails():
        raise error

    monkeypatch.setattr(import_module("darkroom.hardware.machine"), "machine", fails)
    code, _, said = run(capsys, "doctor")
    assert code == 1
    assert said.startswith(f"darkroom: {told}")
    assert said.count("\n") == 1


def test_doctor_says_the_same_as_json(capsys):
    code, out, _ = run(capsys, "doctor", "--json")
    assert code == 0
    names = [check["name"] for check in json.loads(out)]
    assert {"python", "torch", "memory", "disk"} <= set(names)
    _, told, _ = run(capsys, "doctor")
    assert all(name in told for name in names)


def test_doctor_fails_where_something_lacks_that_is_needed(capsys, monkeypatch):
    from importlib import import_module

    monkeypatch.setattr(import_module("darkroom.hardware.machine"), "_MIN_DISK_BYTES", 2**80)
    code, out, error = run(capsys, "doctor")
    assert code == 1
    assert "!!  disk " in out
    assert error == "darkroom: not in order: disk\n"


def test_generate_writes_pictures_that_say_how_they_were_made(capsys, tmp_path):
    from darkroom.sample.pictures import read_parameters

    arguments = ["generate", "tiny", "a red circle", "--steps", "2", "--num", "2", "--seed", "5"]
    code, out, _ = run(capsys, *arguments, "--out", str(tmp_path), "--json")
    assert code == 0
    *pictures, grid = json.loads(out)["pictures"]
    assert Path(grid).is_file()
    assert [read_parameters(path)["seed"] for path in pictures] == [5, 6]


def test_the_readme_names_only_verbs_and_options_that_exist(capsys):
    blocks = re.findall(r"^```\n(.+?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    commands = [found for block in blocks for found in re.findall(r"^darkroom ([^#\n]+)", block, re.M)]
    assert len(commands) >= 10
    for command in commands:
        words = command.split()
        verb = words[:2] if words[0] == "bench" else words[:1]
        code, out, _ = run(capsys, *verb, "--help")
        assert code == 0, command
        for option in re.findall(r"--[a-z-]+", command):
            assert option in out, command


def commands_of(command: Any, *path: str) -> list[tuple[str, ...]]:
    """The command line and everything below it."""
    inner = getattr(command, "commands", {})
    return [path, *(found for name, one in inner.items() for found in commands_of(one, *path, name))]


@pytest.mark.parametrize("path", commands_of(typer.main.get_command(cli.app)), ids=" ".join)
def test_no_line_of_help_is_cut_or_wider_than_80_columns(path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(capsys, *path, "--help")
    assert code == 0
    _, _, listed = out.partition("\nCommands:\n")
    assert [line for line in listed.splitlines() if line.endswith(("...", "…"))] == []
    assert [line for line in out.splitlines() if len(line) > 80] == []


def test_shells_complete_verbs(capsys, monkeypatch):
    for name, value in {"_DARKROOM_COMPLETE": "complete_bash", "COMP_WORDS": "darkroom ins"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COMP_CWORD", "1")
    code, out, _ = run(capsys)
    assert code == 0
    assert out.split() == ["inspect"]


def test_a_console_of_eight_bits_gets_every_message(monkeypatch, tmp_path):
    """As Windows' own: what it lacks is an escape, in JSON one that JSON knows."""
    raw = {name: io.BytesIO() for name in ("stdout", "stderr")}
    for name, stream in raw.items():
        monkeypatch.setattr(sys, name, io.TextIOWrapper(stream, "cp1252", write_through=True))
    monkeypatch.setenv("NO_COLOR", "1")
    with pytest.raises(SystemExit) as left:
        cli.main(["train", "三.yaml", "--out", str(tmp_path / "run")])
    assert left.value.code == 2
    assert b"\\u4e09.yaml" in raw["stderr"].getvalue()
    application.show({"name": "三 é 😀"}, True, list)
    assert json.loads(raw["stdout"].getvalue().decode("cp1252")) == {"name": "三 é 😀"}
    assert b"\\u00e9" in raw["stdout"].getvalue()


@dataclasses.dataclass(frozen=True)
class SizeOptions:
    """A group, as commands take them."""

    wide: Annotated[int, typer.Option(min=1, help="in pixels")]
    high: Annotated[int | None, typer.Option("--tall", help="else as wide")] = None


def test_a_group_stands_for_its_options():
    app, seen = typer.Typer(rich_markup_mode=None), []

    @app.command()
    @grouped
    def draw(
        name: Annotated[str, typer.Argument(help="whose")], *, size: SizeOptions, loud: bool = False
    ) -> None:
        """Draw."""
        seen.append((name, size, loud))

    run = CliRunner().invoke
    assert run(app, ["it", "--wide", "3", "--loud"]).exit_code == 0
    assert run(app, ["it", "--tall", "4", "--wide", "3"]).exit_code == 0
    assert seen == [("it", SizeOptions(3), True), ("it", SizeOptions(3, 4), False)]
    for wrong in (["it"], ["it", "--wide", "0"], ["it", "--wide", "3", "--high", "4"]):
        assert run(app, wrong).exit_code == 2, wrong  # missing, too small, not its name
    assert len(seen) == 2
    told = run(app, ["--help"]).output
    assert "in pixels" in told
    assert told.index("--wide") < told.index("--tall") < told.index("--loud")


class Slide(BaseModel):
    """Settings of which options are made."""

    width: int = Field(3, ge=2, le=9, description="in mm; None: never shown")
    mount: Literal["glass", "card"] = Field("card", description="what holds it")
    tint: float | None = Field(None, gt=0, le=1, description="None: the film's own")
    seed: int = Field(0, ge=0, le=2**63 - 1)
    title: str
    side: tuple[int, int] | None = None


SIDE = {"side": Annotated[str | None, typer.Option(help="of both")]}
FILM = OptionsOf(Slide, ("width", "seed"), flags={"width": "--breadth"}, only_given=True)
SLIDE = OptionsOf(Slide, ("title", "width", "mount", "tint", "seed", "side"), SIDE)


def test_options_are_made_of_a_settings_model():
    app, seen = typer.Typer(rich_markup_mode=None), []
    assert SLIDE.options()["width"][1] == 3

    @app.command()
    @grouped
    def it(*, one: Annotated[dict[str, Any], SLIDE], loud: bool = False) -> None:
        seen.append((one, loud))

    run = CliRunner().invoke
    assert run(app, ["--title", "a", "--width", "9", "--tint", "0.5", "--side", "3x4"]).exit_code == 0
    [(given, loud)] = seen
    assert given == {"title": "a", "width": 9, "mount": "card", "tint": 0.5, "seed": 0, "side": "3x4"}
    assert not loud
    for wrong in ([], ["--title", "a", "--width", "1"], ["--title", "a", "--tint", "2"]):
        assert run(app, wrong).exit_code == 2, wrong  # missing, too small, too large
    assert len(seen) == 1
    told = " ".join(run(app, ["--help"]).output.split())
    for words in ("2<=x<=9", "glass, card: what holds it", "default: the film's own", "of both"):
        assert words in told, words
    assert "9223372036854775807" not in told


def test_options_of_a_model_may_have_other_names_and_be_left_out():
    app, seen = typer.Typer(rich_markup_mode=None), []

    @app.command()
    @grouped
    def it(*, one: Annotated[dict[str, Any], FILM]) -> None:
        seen.append(one)

    run = CliRunner().invoke
    assert run(app, ["--breadth", "9"]).exit_code == run(app, []).exit_code == 0
    assert seen == [{"width": 9, "seed": None}, {"width": None, "seed": None}]
    assert run(app, ["--width", "9"]).exit_code == run(app, ["--breadth", "1"]).exit_code == 2
    assert "in mm; default: never shown; default: 3" in " ".join(run(app, ["--help"]).output.split())


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"title": "a", "mount": "wood"}, "--mount wood; allowed: glass, card"),
        ({"title": "a", "width": 1}, "--breadth 1; allowed: at least 2"),
    ],
)
def test_a_value_that_the_model_refuses_is_named_by_its_option(given, line):
    marked = OptionsOf(Slide, ("title", "width", "mount"), flags={"width": "--breadth"})
    assert marked.settings({"title": "a", "width": 2, "mount": "card"}) == Slide(title="a", width=2)
    with pytest.raises(InputError, match=f"^{re.escape(line)}$"):
        marked.settings(given)


def test_the_choices_of_plan_are_those_that_it_can_plan(capsys):
    from darkroom.cli.planning import TargetSettings
    from darkroom.plan import targets

    choices = {name: get_args(field.annotation) for name, field in TargetSettings.model_fields.items()}
    assert choices["software"] == tuple(targets.SOFTWARE)
    assert set(targets.QUANTISED) < set(choices["precision"])
    assert choices["gpu"] == (), "the control: any name is taken, and looked up"
    for flag, name in (("--software", "software"), ("--mode", "mode"), ("--engine", "engine")):
        code, _, line = run(capsys, "plan", "generate", "--model", "tiny", flag, "magic")
        assert code == 2
        assert line == f"darkroom: {flag} magic; allowed: {', '.join(choices[name])}\n"


def test_the_old_name_of_an_option_is_taken_with_a_line_that_names_the_new_one(capsys):
    code, _, lines = run(capsys, "serve", "model", "--slots=0")
    assert code == 2
    assert lines.startswith("darkroom: --slots is now --max-loras; it goes with the next release\n")
    assert "Invalid value for '--max-loras'" in lines
    code, _, lines = run(capsys, "generate", "model", "--slots=0")
    assert code == 2
    assert "No such option: --slots" in lines, "of another verb it never was one"


def test_groups_have_the_names_of_the_settings_they_become():
    from darkroom.cli import benchmarks, planning, serving
    from darkroom.measure.finetuning import Finetuning
    from darkroom.picture_settings import PictureSettings
    from darkroom.sample import GenerateSettings
    from darkroom.serve.settings import ServeSettings

    def names(group: type) -> set[str]:
        return {field.name for field in dataclasses.fields(group)}

    assert {*DRAWING.names, "hires"} == set(GenerateSettings.model_fields)
    assert set(planning.PICTURES.names) == set(PictureSettings.model_fields)
    assert names(benchmarks.FinetuneOptions) - {"lr"} < names(Finetuning)
    left_to_code = {"model", "more_models", "limits", "provenance", "vertex", "min_free_bytes"}
    assert {*serving.SERVING.names} | left_to_code == set(ServeSettings.model_fields)
    assert names(serving.ServeOptions) & set(ServeSettings.model_fields) <= left_to_code
    assert not names(SizeOptions) & set(GenerateSettings.model_fields), "the control"
