"""The deliberate mistakes of benchmarks/mutants.py are of today's code."""

from __future__ import annotations

from scripts import ROOT, load_script


def test_each_listed_mistake_can_be_made() -> None:
    script = load_script("benchmarks/mutants.py")
    for module, before, after in script.CHOSEN:
        text = (script.SOURCE / module).read_text(encoding="utf-8")
        assert text.count(before) == 1, (module, before)
        compile(text.replace(before, after), module, "exec")


def test_the_tests_of_a_module_are_there() -> None:
    script = load_script("benchmarks/mutants.py")
    listed = {module for module, _, _ in script.CHOSEN} | {module for module, _ in script.EQUIVALENT}
    assert listed <= set(script.TESTS)
    for tests in script.TESTS.values():
        for test in tests:
            file, _, name = test.partition("::")
            assert f"def {name}" in (ROOT / "tests" / file).read_text(encoding="utf-8")
