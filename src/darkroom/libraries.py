"""How torch, diffusers and transformers are loaded: quietly, and without what a run may never use.

Opening a U-Net, VAE and CLIP makes diffusers import torch's compiler, peft, torchao, every transformer and
every autoencoder it knows, and transformers import scipy: half of the time until the first step. `waiting()`
lets those imports wait while it is open: a library is replaced by a stand-in whose names import the real
thing when they are called or read, and a package's `__init__` runs when a name is asked of it that only it
has. Nothing is missing afterwards, and no class or function of a library is another one.

`limit_spinning`, `collect_seldom`, `keep_names`, `hush` and `let_pandas_wait` are for programs, before torch
is imported. Importing this file imports none of them.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from types import ModuleType, NoneType
from typing import Any

LIBRARIES = (
    "accelerate",
    "boto3",
    "peft",
    "scipy",
    "sklearn",
    "torch.distributed.tensor",
    "torchao",
    "transformers.distributed.checkpoint",
    "transformers.distributed.expert_parallel",
    "transformers.distributed.fsdp",
    "transformers.distributed.parallel_utils",
    "transformers.distributed.pipeline_parallel",
    "transformers.distributed.sharding_utils",
    "transformers.distributed.tensor_parallel",
)
"""Imported by diffusers, transformers, accelerate and huggingface_hub for what few of their users do."""
PACKAGES = (
    "diffusers.hooks",
    "diffusers.models.autoencoders",
    "diffusers.models.transformers",
    "diffusers.models.unets",
    "transformers.models",
)
"""Packages whose `__init__` imports or lists every one of their modules."""
COMPILER = "torch._dynamo"
"""Imported by diffusers to mark functions and classes for torch.compile."""
SETTINGS = f"{COMPILER}.config"
_ONE_AT_A_TIME = threading.Lock()  # takes the compiler's stand-in away


class _LateName(type):
    """A class of this type stands for a name of a library that waits."""

    _module: str
    _name: str

    def _real(cls) -> Any:
        _wait_no_longer(cls._module)
        return getattr(importlib.import_module(cls._module), cls._name)

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        return cls._real()(*arguments, **named)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(cls._real(), name)

    def __instancecheck__(cls, instance: Any) -> bool:
        """Nothing is an instance of a class whose module was never imported."""
        return cls._is_there() and isinstance(instance, cls._real())

    def __subclasscheck__(cls, subclass: type) -> bool:
        return cls._is_there() and issubclass(subclass, cls._real())

    def _is_there(cls) -> bool:
        return not isinstance(sys.modules.get(cls._module), (_LateModule, NoneType))


class _LateModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name == "__version__":  # what is built on a library asks for it when it is imported
            with suppress(importlib.metadata.PackageNotFoundError):
                return importlib.metadata.version(self.__name__.partition(".")[0])
        if name.startswith("__"):
            raise AttributeError(name)
        late = _LateName(name, (), {"_module": self.__name__, "_name": name})
        setattr(self, name, late)
        return late


class _LatePackage(ModuleType):
    """A package whose `__init__` runs when a name is asked of it that no module of it has put there."""

    def _whole(self) -> ModuleType:
        """This package after its `__init__` has run, or the module that the `__init__` put in its place."""
        loader = self.__dict__.pop("_waiting_loader", None)
        if loader is not None:
            loader.exec_module(self)
            parent, _, child = self.__name__.rpartition(".")
            setattr(sys.modules[parent], child, sys.modules[self.__name__])
        return sys.modules.get(self.__name__, self)

    def __getattr__(self, name: str) -> Any:
        waits = "_waiting_loader" in self.__dict__
        whole = self if name.startswith("__") else self._whole()
        if whole is self and (name.startswith("__") or not waits):
            raise AttributeError(f"module '{self.__name__}' has no attribute '{name}'")
        return getattr(whole, name)

    def __dir__(self) -> list[str]:
        whole = self._whole()
        return list(super().__dir__()) if whole is self else dir(whole)


class _LateCompiler(ModuleType):
    """Takes what libraries tell torch's compiler when their functions and classes are defined."""

    def allow_in_graph(self, what: Any) -> Any:
        _ON_COMPILER.marked.append(("allow_in_graph", what))
        return what

    def assume_constant_result(self, what: Any) -> Any:
        _ON_COMPILER.marked.append(("assume_constant_result", what))
        return what

    def disable(self, function: Any = None, recursive: bool = True, **_: Any) -> Any:
        """torch's own way to do it without the compiler, which comes with the first call."""
        from torch._compile import _disable_dynamo

        return _disable_dynamo(function, recursive)

    def __getattr__(self, name: str) -> Any:
        """Whatever else is asked of it is asked of the compiler itself: it waits no longer."""
        if name.startswith("__"):
            raise AttributeError(name)
        for finder in sys.meta_path:
            if isinstance(finder, _Finder):
                finder.compiler = False
        _forget_stand_in()
        return getattr(importlib.import_module(COMPILER), name)


class _NoCompiler(_LateCompiler):
    """What torch's optimisers ask of the compiler where nothing is compiled: nothing happens."""

    def disable(self, function: Any = None, recursive: bool = True, **how: Any) -> Any:
        """For torch's own wrapper, which keeps the answer, the function itself until the compiler comes."""
        if how.get("wrapping", True):
            return super().disable(function, recursive)
        _ON_COMPILER.undone.append(function)
        return function

    def graph_break(self) -> None:
        """There is no graph."""

    @property
    def eval_frame(self) -> ModuleType:
        """Of what it has compiled, which is nothing yet: accelerate looks for it before it saves."""
        return _LateModule(f"{COMPILER}.eval_frame")

    def __getattr__(self, name: str) -> Any:
        if name == "__path__":  # one of its modules is looked for: `_OnCompiler` finds it
            spec = importlib.machinery.PathFinder.find_spec(COMPILER, sys.modules["torch"].__path__)
            return None if spec is None else spec.submodule_search_locations
        return super().__getattr__(name)


def _forget_stand_in() -> None:
    """Let the next import of the compiler find itself; what some thread imports already stays."""
    with _ONE_AT_A_TIME:
        if isinstance(sys.modules.get(COMPILER), _LateCompiler):
            _forget(COMPILER)


def _with_settings(compiler: ModuleType) -> ModuleType:
    """The compiler or its stand-in, with its settings where they were imported alone before."""
    if SETTINGS in sys.modules:
        vars(compiler)["config"] = sys.modules[SETTINGS]
    return compiler


@contextmanager
def without_compiler() -> Iterator[None]:
    """Within, torch's optimisers step, and fake tensors are computed with, without importing torch's compiler
    for nothing.

    Where it is imported already nothing changes. Its settings are imported alone, and whatever else is asked
    of it within imports all of it.
    """
    import torch

    if COMPILER in sys.modules:
        yield
        return
    if _ON_COMPILER not in sys.meta_path:
        sys.meta_path.insert(0, _ON_COMPILER)
    sys.modules[COMPILER] = vars(torch)["_dynamo"] = _with_settings(_NoCompiler(COMPILER))
    try:
        yield
    finally:
        _forget_stand_in()


class _LateLoader(importlib.abc.Loader):
    """Makes a stand-in of a kind; a package keeps its own loader for later."""

    def __init__(self, kind: type[ModuleType], own: Any = None) -> None:
        self.kind, self.own = kind, own

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self.kind(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if self.own is not None:
            module.__dict__["_waiting_loader"] = self.own


class _There(importlib.abc.Loader):
    """Gives a module that is imported already."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """It has run."""


class _Wrapping(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports a module by its own loader, with something done before or after."""

    own: Any = None

    def _wrapped(self, name: str, path: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
        """The module's spec with this loader; None where there is no such module."""
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None:
            self.own, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def _run(self, module: ModuleType) -> None:
        module.__loader__ = self.own
        self.own.exec_module(module)


class _OnCompiler(_Wrapping):
    """Imports torch's compiler as ever, and then tells it what was marked for it before."""

    def __init__(self) -> None:
        self.marked: list[tuple[str, Any]] = []
        self.undone: list[Any] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of torch's compiler, with this loader; None for all other modules.

        Asked for a module of it while a stand-in is there, it imports all of it before; but for its settings.
        """
        if name.startswith(f"{COMPILER}."):
            if isinstance(sys.modules.get(COMPILER), _NoCompiler) and name != SETTINGS:
                _forget_stand_in()
                importlib.import_module(COMPILER)
            return importlib.machinery.ModuleSpec(name, _There()) if name in sys.modules else None
        return self._wrapped(name, path) if name == COMPILER else None

    def exec_module(self, module: ModuleType) -> None:
        """Import the module, then apply the marks that waited for it."""
        self._run(_with_settings(module))
        for mark, what in self.marked:
            getattr(module, mark)(what)
        for function in self.undone:  # torch disables it anew at its next call
            vars(function).pop("__dynamo_disable", None)
        self.marked.clear()
        self.undone.clear()


_ON_COMPILER = _OnCompiler()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what waits; what is not installed stays not found."""

    def __init__(self, but: str) -> None:
        self.libraries = [name for name in LIBRARIES if name not in sys.modules and name != but]
        self.compiler = COMPILER not in sys.modules
        self.stand_ins: list[str] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a package or module that is imported late: its stand-in; None for all other modules."""
        if name in PACKAGES:
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            if spec is not None:
                spec.loader = _LateLoader(_LatePackage, spec.loader)
            return spec
        if self.compiler and name.startswith(COMPILER):
            return self._stand_in(name, _LateCompiler if name == COMPILER else _LateModule)
        library = next((one for one in self.libraries if f"{name}.".startswith(f"{one}.")), None)
        if library is None:
            return None
        if name == library and importlib.machinery.PathFinder.find_spec(name, path) is None:
            return None
        return self._stand_in(name, _LateModule)

    def _stand_in(self, name: str, kind: type[ModuleType]) -> importlib.machinery.ModuleSpec:
        self.stand_ins.append(name)
        return importlib.machinery.ModuleSpec(name, _LateLoader(kind), is_package=True)


class _Distributions(Mapping[str, list[str]]):
    """Which installed distributions each package is of; diffusers asks on import and rarely looks."""

    @cached_property
    def _found(self) -> Mapping[str, list[str]]:
        return PACKAGES_DISTRIBUTIONS()

    def __getitem__(self, name: str) -> list[str]:
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


PACKAGES_DISTRIBUTIONS = importlib.metadata.packages_distributions


@contextmanager
def waiting(*, but: str = "") -> Iterator[None]:
    """Let `LIBRARIES` (`but` one), torch's compiler and the `__init__` of `PACKAGES` wait while others are
    imported.

    What is imported already stays as it is. On leaving the stand-ins are gone: an import of one of the
    libraries from then on gets it. Parallel styles of transformers are registered by importing
    `transformers.distributed.tensor_parallel` and `expert_parallel`, which its models do not do then.
    """
    finder = _Finder(but)
    if finder.compiler and _ON_COMPILER not in sys.meta_path:
        sys.meta_path.insert(0, _ON_COMPILER)
    sys.meta_path.insert(0, finder)
    importlib.metadata.packages_distributions = _Distributions
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = PACKAGES_DISTRIBUTIONS
        sys.meta_path.remove(finder)
        for name in finder.stand_ins:
            if isinstance(sys.modules.get(name), (_LateModule, _LateCompiler)):
                _forget(name)


def _wait_no_longer(module: str) -> None:
    """Let the next import of a library's module find itself, also where `waiting` is open."""
    finders = [finder for finder in sys.meta_path if isinstance(finder, _Finder)]
    if not finders:
        return
    library = next((one for one in LIBRARIES if f"{module}.".startswith(f"{one}.")), module)
    for finder in finders:
        finder.libraries = [one for one in finder.libraries if one != library]
    for name in list(sys.modules):
        if f"{name}.".startswith(f"{library}.") and isinstance(sys.modules.get(name), _LateModule):
            _forget(name)


def _forget(name: str) -> None:
    module = sys.modules.pop(name, None)
    parent, _, child = name.rpartition(".")
    if parent and vars(sys.modules.get(parent, sys)).get(child) is module:
        delattr(sys.modules[parent], child)


def limit_spinning() -> None:
    """Let OpenMP threads sleep after waiting a little, unless the user set it; torch reads it on import.

    Threads that spin without end make a U-Net step up to 30 times slower on a busy small machine.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def collect_seldom() -> None:
    """Look for objects that only hold each other after 50,000 new ones, in place of Python's 700: importing
    makes a million that stay. Where that was set to something else it stays.
    """
    if gc.get_threshold()[0] in (700, 2000):  # the second is Python 3.14's
        gc.set_threshold(50_000, *gc.get_threshold()[1:])


IMPORT_UTILS = "transformers.utils.import_utils"


class _KeptNames(_Wrapping):
    """Has transformers take from a file which names its 2,000 files define, which it looks up in all of them
    whenever it is imported."""

    def __init__(self, folder: Path, write: Callable[[Path, str], object]) -> None:
        self.folder, self.write = folder, write

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of the module that looks the names up, with this loader; None for all other modules."""
        return self._wrapped(name, path) if name == IMPORT_UTILS else None

    def exec_module(self, module: ModuleType) -> None:
        """Import the module; the first look-up, which is that of all models, may come from the file."""
        self._run(module)
        look_up = vars(module).get("define_import_structure")
        if look_up is None:
            return

        def kept(module_path: Any, prefix: str | None = None) -> Any:
            vars(module)["define_import_structure"] = look_up
            return self._names(look_up, Path(module_path), prefix)

        vars(module)["define_import_structure"] = kept

    def _names(self, look_up: Callable[..., Any], models: Path, prefix: str | None) -> Any:
        version = importlib.metadata.version("transformers")
        if not {"site-packages", "dist-packages"} & set(models.parts):  # where somebody may be changing it
            return look_up(models, prefix=prefix)
        known = f"{version} {models} {models.stat().st_mtime_ns} {prefix}"
        file = self.folder / f"names-{hashlib.sha256(known.encode()).hexdigest()[:16]}.json"
        with suppress(*_NO_NAMES):
            return _names_of(file.read_text(encoding="utf-8"))
        names = look_up(models, prefix=prefix)
        with suppress(*_NO_NAMES):  # a cache that cannot be written costs the next start what this one took
            text = json.dumps(
                [[sorted(needs), {k: sorted(v) for k, v in of.items()}] for needs, of in names.items()]
            )
            if _names_of(text) == names:
                self.write(file, text)
        return names


_NO_NAMES = (OSError, ValueError, TypeError, AttributeError)
"""A file is not there, cannot be written or has something else; or names come in another form."""


def _names_of(text: str) -> dict[frozenset[str], dict[str, set[str]]]:
    names = {frozenset(needs): {k: set(v) for k, v in of.items()} for needs, of in json.loads(text)}
    if not names:
        raise ValueError("no names")
    return names


def keep_names(folder: Path, write: Callable[[Path, str], object]) -> None:
    """Let transformers keep in a file of `folder`, which `write` writes, which names its files define."""
    if "transformers" not in sys.modules and not any(isinstance(one, _KeptNames) for one in sys.meta_path):
        sys.meta_path.insert(0, _KeptNames(folder, write))


class _NoPandasYet(importlib.abc.MetaPathFinder):
    """Finds no pandas while pyarrow's datasets are imported: pyarrow looks for it then without need."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """None, or ModuleNotFoundError for pandas then."""
        asking = sys.modules.get("pyarrow._dataset")
        if name == "pandas" and getattr(getattr(asking, "__spec__", None), "_initializing", False):
            raise ModuleNotFoundError("pandas waits until something asks for it", name=name)
        return None


def let_pandas_wait() -> None:
    """Import pandas when a table is turned into its frames, not whenever pyarrow's datasets are imported.

    pyarrow looks once whether pandas is there and, where it was not, again when it needs it. A program that
    gives pyarrow series of pandas before that has them read as plain sequences.
    """
    if "pandas" not in sys.modules and not any(isinstance(one, _NoPandasYet) for one in sys.meta_path):
        sys.meta_path.insert(0, _NoPandasYet())


def hush() -> None:
    """Let diffusers, transformers, torchao and torch's pytree tell errors only; call it before they load."""
    for library in ("DIFFUSERS", "TRANSFORMERS"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    for library in ("torchao", "torch.utils._pytree"):  # torchao, where it is, tells of kernels it lacks
        logging.getLogger(library).setLevel(logging.ERROR)


@contextmanager
def quiet() -> Iterator[None]:
    """Only errors, and no progress bars, from diffusers and transformers; what was set before comes back."""
    with waiting():
        from diffusers.utils import logging as diffusers_logging
        from transformers.utils import logging as transformers_logging

    libraries = (diffusers_logging, transformers_logging)
    before = [library.get_verbosity() for library in libraries]
    bar_before = transformers_logging.is_progress_bar_enabled()
    for library in libraries:
        library.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        for library, verbosity in zip(libraries, before, strict=True):
            library.set_verbosity(verbosity)
        if bar_before:
            transformers_logging.enable_progress_bar()
