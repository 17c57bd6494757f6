"""Import rules: which package may import which, how quick an import is, that nothing heavy comes along."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from darkroom import data, models

SOURCE = Path(__file__).resolve().parents[1] / "src" / "darkroom"

LEVELS = (
    {"errors", "lazy", "libraries"},
    {"hardware", "counting"},
    {"bill", "tables", "options", "certificates", "count_cache"},
    {"run", "picture_settings"},
    {"models", "data"},
    {"prepare", "sample", "evaluate"},
    {"recipe"},
    {"train"},
    {"serve"},
    {"measure", "plan"},
    {"report", "cluster"},
    {"proof", "quickstart"},
    {"cli"},
    {"__main__"},
)
"""From left to right: a package imports packages of earlier levels and itself."""


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported_siblings(path: Path) -> set[str]:
    packages: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "darkroom":
            names = [f"darkroom.{alias.name}" for alias in node.names if alias.name != "__version__"]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        else:
            continue
        packages |= {name.split(".")[1] for name in names if name.startswith("darkroom.")}
    return packages


def wrong_imports(path: Path) -> set[str]:
    package = package_of(path)
    level = next(i for i, packages in enumerate(LEVELS) if package in packages)
    allowed = {package}.union(*LEVELS[:level])
    return imported_siblings(path) - allowed


FILES = sorted(path for path in SOURCE.rglob("*.py") if path.name != "__init__.py" or path.parent != SOURCE)


def test_a_package_imports_only_packages_to_its_left():
    assert {str(path): wrong for path in FILES if (wrong := wrong_imports(path))} == {}


def test_an_import_from_the_right_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "store.py").write_text(
        "from darkroom.models import load\nimport darkroom.train.step\n"
    )
    assert wrong_imports(tmp_path / "data" / "store.py") == {"models", "train"}


def modules_imported(path: Path, modules: dict[str, Path]) -> set[str]:
    """The modules of darkroom that a file imports, anywhere in it, type-only imports included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else node.module for name in inner}
    return found & modules.keys()


def import_circle(modules: dict[str, Path]) -> list[str]:
    """A chain of modules that ends where it began, or nothing."""
    graph = {name: modules_imported(path, modules) - {name} for name, path in modules.items()}
    done: set[str] = set()

    def walk(name: str, way: list[str]) -> list[str]:
        if name in way:
            return [*way[way.index(name) :], name]
        if name in done:
            return []
        for other in sorted(graph[name]):
            if circle := walk(other, [*way, name]):
                return circle
        done.add(name)
        return []

    return next((circle for name in sorted(graph) if (circle := walk(name, []))), [])


def modules_of(source: Path) -> dict[str, Path]:
    parts = {path: path.relative_to(source.parent).with_suffix("").parts for path in source.rglob("*.py")}
    return {".".join(p[:-1] if p[-1] == "__init__" else p): path for path, p in parts.items()}


def test_no_modules_import_each_other_in_a_circle(tmp_path):
    assert import_circle(modules_of(SOURCE)) == []
    folder = tmp_path / "darkroom"
    folder.mkdir()
    (folder / "one.py").write_text("if TYPE_CHECKING:\n    from darkroom.two import b\n")
    (folder / "two.py").write_text("def b():\n    from darkroom import one\n")
    assert import_circle(modules_of(folder)) == ["darkroom.one", "darkroom.two", "darkroom.one"]


def test_only_the_command_line_imports_the_published_systems():
    importing = {package_of(path) for path in FILES if "proof" in imported_siblings(path)}
    assert importing <= {"proof", "cli"}


def test_a_recipe_is_read_without_torch():
    names = imported_with("import darkroom.recipe")
    assert not {"torch", "diffusers", "transformers", "lance", "matplotlib", "PIL"} & names


def test_a_plan_of_kept_counts_needs_no_torch():
    names = imported_with("from darkroom.plan import advise, ask, fits, trace")
    assert "numpy" in names
    assert not {"torch", "diffusers", "transformers", "lance", "matplotlib", "PIL"} & names


def test_only_the_cluster_imports_ray():
    users = {package_of(path) for path in FILES if "import ray" in path.read_text()}
    assert users <= {"cluster"}


def imported_with(statement: str) -> set[str]:
    """The packages that came with an import in a fresh interpreter."""
    code = f"{statement}; import sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    return set(subprocess.check_output([sys.executable, "-c", code], text=True).split())


HEAVY = {"torch", "diffusers", "transformers", "lance", "pyarrow", "numpy", "matplotlib", "PIL", "pydantic"}


@pytest.mark.parametrize("statement", ["import darkroom", "import darkroom.errors"])
def test_importing_darkroom_brings_nothing_heavy(statement):
    assert not HEAVY & imported_with(statement)


def test_the_command_line_answers_help_without_torch():
    names = imported_with("import darkroom.cli")
    assert not {"torch", "diffusers", "transformers", "lance", "matplotlib"} & names


def test_no_torchvision_anywhere():
    for path in FILES:
        assert "torchvision" not in imported_packages(path), path


def imported_packages(path: Path) -> set[str]:
    nodes = list(ast.walk(tree(path)))
    plain = {
        alias.name.split(".")[0] for node in nodes if isinstance(node, ast.Import) for alias in node.names
    }
    return plain | {
        node.module.split(".")[0] for node in nodes if isinstance(node, ast.ImportFrom) and node.module
    }


EXTRAS = {
    *("fastapi", "starlette", "uvicorn", "prometheus_client", "sqlalchemy", "psycopg", "ray", "tensorboard"),
    *("wandb", "s3fs", "pynvml", "torchao", "onnxruntime", "onnx", "onnxscript", "openvino", "prodigyopt"),
    *("schedulefree", "scipy", "httpx", "openai", "pytest", "pandas"),
}
"""Imported names of what only an extra of pyproject.toml brings."""


def imported_at_once(path: Path) -> set[str]:
    """Packages that importing a file imports; what functions import comes later."""
    nodes = [node for node in tree(path).body if isinstance(node, ast.Import | ast.ImportFrom)]
    plain = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    from_ = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[0] for name in [*plain, *from_]}


def test_without_extras_every_package_but_the_server_can_be_imported():
    users = {package_of(path) for path in FILES if imported_at_once(path) & EXTRAS}
    assert users == {"serve"}


def test_a_missing_package_names_an_extra_that_there_is():
    text = (SOURCE.parents[1] / "pyproject.toml").read_text()
    declared = set(tomllib.loads(text)["project"]["optional-dependencies"])
    named = [
        (path.name, ast.literal_eval(call.args[1]))
        for path in FILES
        for call in ast.walk(tree(path))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "MissingExtra"
        if isinstance(call.args[1], ast.Constant)
    ]
    assert len(named) >= 8
    assert [(file, extra) for file, extra in named if extra not in declared] == []


def test_nothing_is_unpickled_and_no_remote_code_is_trusted():
    for path in FILES:
        text = path.read_text()
        assert "trust_remote_code" not in text, path
        assert not {"pickle", "dill", "joblib"} & imported_packages(path), path
        for call in (node for node in ast.walk(tree(path)) if isinstance(node, ast.Call)):
            if ast.unparse(call.func) == "torch.load":
                assert any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in call.keywords)


SYSTEM = SOURCE / "hardware" / "system.py"
ONE_SYSTEM_MODULES = {
    "fcntl",
    "resource",
    "msvcrt",
    "winreg",
    "pwd",
    "grp",
    "termios",
    "tty",
    "pty",
    "filelock",
}
ONE_SYSTEM = re.compile(
    r"os\.(fork\w*|sched_\w+|getloadavg|uname|posix_\w+|pread\w*|pwrite\w*|kill(pg)?|[gs]et(p?gid|sid|e?uid))"
    r"|os\.(mkfifo|wait\w*|nice|statvfs|replace|rename|O_DIRECTORY|O_NOFOLLOW)"
    r"|signal\.SIG(?!INT$|TERM$|_)\w+|signal\.(alarm|setitimer|pause)|socket\.AF_UNIX|\w+\.add_signal_handler"
)
KERNEL_FILE = re.compile(r"(?<![\w.])/(proc|sys)(/|$)")


def of_one_system(path: Path) -> set[str]:
    """What a file names that only some systems have, or that goes otherwise on Windows.

    Names imported from a module count as its attributes. A rename has one argument, and so differs from the
    `replace` of texts, dates and dataclasses.
    """
    found = set()
    for node in ast.walk(tree(path)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            found |= {node.value} if KERNEL_FILE.search(node.value) else set()
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_rename = node.func.attr in ("replace", "rename") and len(node.args) == 1 and not node.keywords
            found |= {ast.unparse(node)} if is_rename else set()
        found |= {
            name for name in names if name.split(".")[0] in ONE_SYSTEM_MODULES or ONE_SYSTEM.search(name)
        }
    return found


def test_what_differs_by_system_stands_in_one_file(tmp_path):
    elsewhere = {str(path): some for path in FILES if path != SYSTEM and (some := of_one_system(path))}
    assert elsewhere == {}
    assert {"fcntl", "resource", "/proc/self/status"} <= of_one_system(SYSTEM), "the control: they are found"


@pytest.mark.parametrize(
    "line",
    [
        *(
            "import fcntl",
            "def f():\n    from resource import getrlimit",
            "from os import fork",
            "os.uname()",
        ),
        *("os.sched_getaffinity(0)", "os.posix_fadvise(1, 0, 0, 4)", "signal.SIGUSR1", "x = socket.AF_UNIX"),
        *("loop.add_signal_handler(2, stop)", "Path('/proc/meminfo')", "f'/sys/fs/{name}'", "a.replace(b)"),
        *("os.replace(a, b)", "path.with_name(x).rename(target)"),
    ],
)
def test_the_rule_finds_each_of_them(line, tmp_path):
    (tmp_path / "one.py").write_text(line + "\n")
    assert of_one_system(tmp_path / "one.py")


def test_the_rule_lets_through_what_every_system_has(tmp_path):
    lines = (
        "import os, signal, psutil",
        "signal.signal(signal.SIGTERM, signal.SIG_DFL)",
        "text.replace('a', 'b'); moment.replace(tzinfo=UTC); replace(column, encode=None)",
        "'application/proc'; 'a text of /proc and /sys'; os.fsync(1); os.open(path, os.O_RDONLY)",
    )
    (tmp_path / "one.py").write_text("\n".join(lines) + "\n")
    assert of_one_system(tmp_path / "one.py") == set()


OF_ONE_MAKE = re.compile(r"torch\.(cuda|xpu|mps|backends\.mps)\b|\w+\.is_cuda$")
OF_CUDA = {SOURCE / "sample/optimisations" / name for name in ("compiled.py", "triton_kernels.py")}
"""What captures CUDA graphs, which no other make has, and kernels that no other make is tried with."""


def of_one_make(path: Path) -> set[str]:
    """What a file names that only one make of accelerator has."""
    names = {ast.unparse(node) for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)}
    return {name for name in names if OF_ONE_MAKE.match(name)}


def test_only_one_file_names_makes_of_accelerators(tmp_path):
    allowed = {SOURCE / "hardware/accelerator.py", *OF_CUDA}
    assert {str(path): found for path in FILES if path not in allowed and (found := of_one_make(path))} == {}
    assert all(of_one_make(path) for path in allowed)  # else the exception is not needed any more
    for line in ("torch.cuda.synchronize()", "if x.is_cuda: pass", "torch.backends.mps.is_available()"):
        (tmp_path / f"{len(line)}.py").write_text(line + "\n")
        assert of_one_make(tmp_path / f"{len(line)}.py")


DELETES = re.compile(r"shutil\.rmtree|os\.(unlink|remove)|.*\.unlink$")


def test_only_one_file_deletes(tmp_path):
    """On Windows what is open cannot be deleted: system.remove_file and remove_tree wait for it."""

    def deletes(path: Path) -> set[str]:
        calls = (ast.unparse(node.func) for node in ast.walk(tree(path)) if isinstance(node, ast.Call))
        return {name for name in calls if DELETES.match(name)}

    assert {str(path) for path in FILES if deletes(path)} == {str(SOURCE / "hardware/system.py")}
    (tmp_path / "one.py").write_text("path.unlink(); shutil.rmtree(path)\n")
    assert deletes(tmp_path / "one.py") == {"path.unlink", "shutil.rmtree"}


def test_temporary_folders_may_outlive_what_they_were_for(tmp_path):
    """On Windows one with a file that is still mapped cannot be deleted, which is no reason to fail."""

    def strict(path: Path) -> list[int]:
        calls = [node for node in ast.walk(tree(path)) if isinstance(node, ast.Call)]
        made = [call for call in calls if ast.unparse(call.func).endswith("TemporaryDirectory")]
        kept = [call for call in made if "ignore_cleanup_errors" not in {k.arg for k in call.keywords}]
        return [call.lineno for call in kept]

    assert {str(path): found for path in FILES if (found := strict(path))} == {}
    (tmp_path / "one.py").write_text("with tempfile.TemporaryDirectory() as folder:\n    pass\n")
    assert strict(tmp_path / "one.py") == [1]


def without_encoding(path: Path) -> list[str]:
    """Calls that read or write text in the system's own encoding; ruff finds those of known paths alone."""
    calls = [node for node in ast.walk(tree(path)) if isinstance(node, ast.Call)]
    most = {"read_text": 0, "write_text": 1}
    return [
        f"{path.name}:{call.lineno}"
        for call in calls
        if isinstance(call.func, ast.Attribute) and len(call.args) <= most.get(call.func.attr, -1)
        if "encoding" not in {keyword.arg for keyword in call.keywords}
    ]


def test_text_is_read_and_written_in_an_encoding_that_is_named(tmp_path):
    assert [call for path in FILES for call in without_encoding(path)] == []
    (tmp_path / "one.py").write_text("(a / b).read_text()\nc.write_text(text)\nc.write_text(text, 'utf-8')\n")
    assert without_encoding(tmp_path / "one.py") == ["one.py:1", "one.py:2"]


HOLDS = {"Tensor", "Module"}
"""Whose text is long and slow to make, and so is that of all that holds one."""


def shown_fields() -> dict[str, set[str]]:
    """The dataclasses that say in their `repr` what they hold, and the names in their fields' types."""
    found = {}
    held = ("models", "sample", "serve")
    for path in (one for package in held for one in (SOURCE / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for mark in node.decorator_list if isinstance(node, ast.ClassDef) else ():
                text = {one.arg: ast.unparse(one.value) for one in getattr(mark, "keywords", ())}
                if ast.unparse(mark).startswith("dataclass") and text.get("repr") != "False":
                    fields = [one.annotation for one in node.body if isinstance(one, ast.AnnAssign)]
                    words = {word for one in fields for word in re.findall(r"\w+", ast.unparse(one))}
                    found[f"{path.relative_to(SOURCE)}:{node.name}"] = words
    return found


def test_what_holds_tensors_has_no_repr_of_them():
    """A repr that was formed by accident, by an error's message, held up a whole server for seconds."""
    shown = shown_fields()
    assert len(shown) > 20, "the control: dataclasses are found"
    assert {name for name, words in shown.items() if words & HOLDS} == set()


def classes_of(source: Path) -> dict[str, list[str]]:
    """The classes under a folder, nested ones included: their names, and the files that define them."""
    found: dict[str, list[str]] = {}
    for path in sorted(source.rglob("*.py")):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(path.relative_to(source).as_posix())
    return found


def test_no_class_name_occurs_twice(tmp_path):
    assert {name: files for name, files in classes_of(SOURCE).items() if len(files) > 1} == {}
    (tmp_path / "one.py").write_text("class Job: ...\n")
    (tmp_path / "two.py").write_text("def made():\n    class Job: ...\n")
    assert classes_of(tmp_path) == {"Job": ["one.py", "two.py"]}


def functions_of_one_file(source: Path, others: list[Path]) -> set[str]:
    """Public functions of modules whose name no other file has as a word; commands are called by typer."""
    files = {path: set(re.findall(r"\w+", path.read_text(encoding="utf-8"))) for path in others}
    files |= {
        path: set(re.findall(r"\w+", path.read_text(encoding="utf-8"))) for path in source.rglob("*.py")
    }
    counts = Counter(word for words in files.values() for word in words)
    return {
        node.name
        for path in source.rglob("*.py")
        for node in tree(path).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("_")
        and not any(".command(" in ast.unparse(one) for one in node.decorator_list)
        and counts[node.name] == 1
    }


def test_a_function_that_only_its_own_file_calls_is_private(tmp_path):
    root = SOURCE.parents[1]
    folders = [(root / folder) for folder in ("tests", "benchmarks", "docs")]
    others = [path for folder in folders for end in ("*.py", "*.md") for path in folder.rglob(end)]
    others.remove(Path(__file__).resolve())
    assert functions_of_one_file(SOURCE, others) == set()
    (tmp_path / "one.py").write_text("def used(): ...\ndef own(): ...\ndef _private(): ...\n")
    (tmp_path / "two.py").write_text("from one import used\n")
    assert functions_of_one_file(tmp_path, []) == {"own"}


RECIPE_IS_ONE_ARGUMENT = {
    # a run: begun, gone on with, in phases, in the workers of a cluster
    *("train/run.py:train", "train/run.py:_Launch"),
    "cluster/train.py:train",
    # what is put together of it
    *("train/setup.py:make_job", "train/setup.py:make_task"),
    "train/jobs.py:TrainingSetup",
    # what is made of it at the end
    "train/exports.py:Exporter",
    # the same run, asked of instead of made
    "plan/ask.py:ask_recipe_object",
}
"""Who sees a whole recipe: functions that need most of its sections, or hand it on to one that does."""


def holders_of_recipes(path: Path) -> set[str]:
    """Functions with a parameter, and classes with a field, that is a whole recipe or is called one."""

    def is_recipe(name: str, annotation: ast.expr | None) -> bool:
        text = "" if annotation is None else ast.unparse(annotation)
        return bool(re.search(r"\bRecipe\b", text)) or (name == "recipe" and text in ("", "Any", "object"))

    def walk(node: ast.AST, way: str) -> set[str]:
        found: set[str] = set()
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            inner = f"{way}.{child.name}" if named and way else child.name if named else way
            pairs: list[tuple[str, ast.expr | None]] = []
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                given = child.args
                every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
                pairs = [(one.arg, one.annotation) for one in every if one is not None]
            elif isinstance(child, ast.ClassDef):
                fields = [one for one in child.body if isinstance(one, ast.AnnAssign)]
                pairs = [(ast.unparse(one.target), one.annotation) for one in fields]
            if any(is_recipe(*pair) for pair in pairs):
                found.add(f"{path.relative_to(SOURCE)}:{inner}")
            found |= walk(child, inner)
        return found

    return walk(tree(path), "")


def test_functions_take_the_sections_they_need(tmp_path, monkeypatch):
    """One that takes the whole recipe is listed with its reason; better it takes sections."""
    assert {one for path in FILES for one in holders_of_recipes(path)} == RECIPE_IS_ONE_ARGUMENT
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    (tmp_path / "one.py").write_text(
        "def a(recipe: Recipe): ...\n"
        "def b(recipe): ...\n"
        "class C:\n    held: 'list[Recipe]'\n    async def d(self, *, x: Recipe | None = None): ...\n"
        "def e(train: TrainSettings, recipe: Path):\n    f = lambda recipe: recipe.train\n"
        "def g(fine: RecipeError): ...\n"
    )
    assert holders_of_recipes(tmp_path / "one.py") == {
        "one.py:a",
        "one.py:b",
        "one.py:C",
        "one.py:C.d",
        "one.py:e",
    }


ON_ITS_OWN = {
    "__main__.py",  # `python -m darkroom`
    "cluster/notice.py",  # a program that runs next to `ray start`
    "cli/machine.py",  # verbs, in the order of `darkroom --help`
    "measure/job_history.py",  # needs the server's extra, which other benchmarks do without
    "serve/hooks.py",  # what an operator's own functions import
}
"""Small files that one file imports, or none, with why they are files nevertheless."""
SMALL = 120


def small_files(source: Path) -> set[str]:
    """Files of fewer lines that at most one other imports; a package's `__init__` is where its names are."""
    modules = modules_of(source)
    importing = Counter(
        name for own, path in modules.items() for name in modules_imported(path, modules) - {own}
    )
    return {
        path.relative_to(source).as_posix()
        for name, path in modules.items()
        if importing[name] < 2 and path.name != "__init__.py"
        if path.read_text(encoding="utf-8").count("\n") < SMALL
    }


def test_a_small_file_has_two_that_import_it(tmp_path):
    assert small_files(SOURCE) == ON_ITS_OWN
    for name, text in (("one", "x = 1\n"), ("two", "import darkroom.one\n" * SMALL), ("three", "y = 2\n")):
        (tmp_path / "darkroom").mkdir(exist_ok=True)
        (tmp_path / "darkroom" / f"{name}.py").write_text(text)
    assert small_files(tmp_path / "darkroom") == {"one.py", "three.py"}


DIALECT = re.compile(
    r"\b(told|beside|aboard|let go|whole or not|search for garbage|made larger|foretell\w*|in good order|"
    r"whoever|keeping house|set aside|doors?|rooms?|walls?)\b(?! time)"
)
"""Words for which the field has others; 'wall time' is one of the field's own."""
MEANT = {"horizons and walls have their energy", "format_seconds(self.wall_s)} wall", '".beside-*"'}
"""Walls in photographs, seconds by the clock on the wall, and files of an older release."""


def dialect_of(text: str) -> list[str]:
    """The lines with such a word."""
    return [line.strip() for line in text.splitlines() if DIALECT.search(line)]


def test_source_is_written_in_the_words_of_the_field():
    found = {line for path in FILES for line in dialect_of(path.read_text(encoding="utf-8"))}
    assert {line for line in found if not any(words in line for words in MEANT)} == set()
    assert dialect_of("# the wall time\n# rows go aboard\n# all doors") == ["# rows go aboard", "# all doors"]


LONGEST = 80


def long_functions(path: Path) -> list[str]:
    """Functions of more lines than that, a command's options counted."""
    functions = (
        one for one in ast.walk(tree(path)) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return [one.name for one in functions if (one.end_lineno or 0) - one.lineno + 1 > LONGEST]


def test_no_function_is_longer_than_a_screen_or_two(tmp_path):
    assert {str(path): found for path in FILES if (found := long_functions(path))} == {}
    for lines, expected in ((LONGEST - 1, []), (LONGEST, ["f"])):
        (tmp_path / f"{lines}.py").write_text("def f():\n" + "    pass\n" * lines)
        assert long_functions(tmp_path / f"{lines}.py") == expected


def first_imports(path: Path) -> set[str]:
    """What a file imports whenever it is imported itself."""
    found: set[str] = set()
    for node in tree(path).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return found


def test_importing_models_and_data_waits_for_diffusers():
    """Two seconds of what imports, prepares and reads stores, and opens neither a U-Net nor a VAE."""
    lazy = [f"{one.__name__}.{name}" for one in (models, data) for name in one._MODULES]
    waiting, seen = [*lazy, "darkroom.prepare"], set[str]()
    while waiting:
        name = waiting.pop()
        place = SOURCE.joinpath(*name.split(".")[1:])
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if name in seen or not file.is_file():
            continue
        seen.add(name)
        imported = first_imports(file)
        heavy = imported & {"diffusers", "transformers", "darkroom.models.parts"}
        assert not heavy, (name, heavy)
        waiting += [one for one in imported if one.startswith("darkroom.")]
    assert {"darkroom.models.image_prompt", "darkroom.data.loader", "darkroom.prepare.job"} <= seen
    assert {"darkroom.data.importers.job", "darkroom.data.inspect"} <= seen
    assert "darkroom.models.parts" in first_imports(SOURCE / "models" / "image_attention.py")
