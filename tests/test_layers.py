"""Imports go only downward and never in a circle, and nothing heavy is imported while loading."""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import shardctl

ROOT = Path(shardctl.__file__).parent
LAYERS = (
    ("base",),
    ("storage", "hardware"),
    ("tensors",),
    ("models",),
    ("libraries", "estimate"),
    ("options", "verify"),
    ("checkpoint",),
    ("conversion",),
    ("planning", "running"),
    ("verbs",),
    ("report", "cli", "api"),
)
"""From the ground up; each name is a package or module of `shardctl`.

A package imports from lower layers, and from those before it in its own. `docs/extending.md` says the same, and a test
compares the two.
"""
LIBRARIES = ROOT / "libraries"
SHARED = {"arrays", "files", "safetensors", "torch_save", "dcp", "reader", "registry", "schemas", "writer", "catalogue"}
"""What libraries may import of each other: the machinery, and the containers that others build on (Megatron-LM's
`torch_dist` consists of the files of torch's DCP, and ranks pickle DCP's types)."""
HEAVY = {"torch", "transformers", "safetensors"}
"""Never imported while a module loads, and except by those of `TORCH` not at all."""
TORCH = (
    "running/",
    "verify/tolerance.py",
    "verify/transformers_classes.py",
    "verify/config_comparison.py",
    "verify/library_headers.py",
    "estimate/local_device.py",
)
"""What runs a model, and what asks the machine for its devices."""

LEVEL = {name: (level, place) for level, names in enumerate(LAYERS) for place, name in enumerate(names)}
MODULES = sorted(ROOT.rglob("*.py"))


def layer_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0]


@cache
def imports(path: Path) -> list[tuple[str, int, bool]]:
    """Every import as `(absolute dotted name, line, whether loading the module executes it)`."""
    found = []

    def visit(node: ast.AST, *, runs: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend((alias.name, node.lineno, runs) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: relative import"
            found.extend((f"{node.module}.{alias.name}", node.lineno, runs) for alias in node.names)
        deferred = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing_only = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for child in ast.iter_child_nodes(node):
            visit(child, runs=runs and not deferred and not (typing_only and child in node.body))

    visit(ast.parse(path.read_text(encoding="utf-8")), runs=True)
    return found


def violations(path: Path) -> list[str]:
    """What `path` imports from a layer that is not below its own; imports for typing and in functions count too."""
    own = layer_of(path)
    wrong = []
    for name, line, _ in imports(path):
        package, _, rest = name.partition(".")
        other = rest.split(".")[0]
        if package != "shardctl" or other not in LEVEL or other == own:
            continue
        if LEVEL[other] >= LEVEL[own]:
            wrong.append(f"{path.relative_to(ROOT)}:{line}: {own} imports {other}")
    return wrong


def name_of(path: Path) -> str:
    parts = ["shardctl", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def graph(paths: list[Path]) -> dict[str, set[str]]:
    """The modules that each module names in an import, for types and in functions too.

    What a package hands on is imported from the package; of `from package import module`, only the module counts.
    """
    names = {name_of(path) for path in paths}
    found: dict[str, set[str]] = {}
    for path in paths:
        own = name_of(path)
        targets = {name if name in names else name.rpartition(".")[0] for name, _, _ in imports(path)}
        found[own] = (targets & names) - {own}
    return found


def test_every_module_has_a_layer():
    assert {layer_of(path) for path in MODULES} - {*LEVEL, "__init__", "__main__"} == set()


def test_imports_go_only_downward():
    assert [line for path in MODULES if layer_of(path) in LEVEL for line in violations(path)] == []


def test_the_documentation_names_the_same_layers():
    page = (ROOT.parent / "docs" / "extending.md").read_text(encoding="utf-8")
    shown = page.partition("```text\n")[2].partition("```")[0].splitlines()
    named = [set(re.findall(r"\w+", line.partition("  ")[0])) for line in shown if not line.startswith(" ")]
    assert named == [set(names) for names in reversed(LAYERS)]


def library_of(name: str) -> str:
    return name.removeprefix("shardctl.libraries.").split(".")[0]


def test_libraries_do_not_import_each_other():
    found = graph(sorted(LIBRARIES.rglob("*.py")))
    strangers = [
        (own, other)
        for own, others in found.items()
        for other in others
        if library_of(own) != library_of(other) and library_of(other) not in SHARED and library_of(own) not in SHARED
    ]
    assert strangers == []


CORE = (
    *("base", "tensors", "storage", "libraries.arrays", "libraries.files", "libraries.safetensors", "models.tables"),
    *("models.names", "models.rules", "checkpoint", "conversion", "verify"),
)
"""What one person can understand: the packages of every conversion from safetensors to safetensors."""
NOT_OF_CORE = ("estimate", "planning", "running", "models.families.")


def test_the_core_imports_no_estimate_no_running_and_no_family():
    found = graph(MODULES)
    strangers = [
        (own, other)
        for own, others in found.items()
        if own.removeprefix("shardctl.").startswith(CORE)
        for other in others
        if other.removeprefix("shardctl.").startswith(NOT_OF_CORE)
    ]
    assert strangers == []


def test_no_library_reads_with_what_writes_or_writes_with_what_reads():
    """Which is which is said by the name of a module."""
    found = graph(sorted(LIBRARIES.rglob("*.py")))
    ways = ("reading", "reader"), ("writing", "writer")
    for one, other in (ways, ways[::-1]):
        crossed = [(a, b) for a, targets in found.items() for b in targets if a.endswith(one) and b.endswith(other)]
        assert crossed == []


def test_no_modules_import_each_other_in_a_circle():
    list(TopologicalSorter(graph(MODULES)).static_order())


def test_nothing_heavy_is_imported_while_loading():
    heavy = [(path, name) for path in MODULES for name, _, runs in imports(path) if runs and is_heavy(name)]
    assert heavy == []


def test_only_those_that_need_torch_import_it_at_all():
    heavy = [(path, name) for path in MODULES for name, _, _ in imports(path) if is_heavy(name)]
    assert [line for line in heavy if not str(line[0].relative_to(ROOT)).startswith(TORCH)] == []


def is_heavy(name: str) -> bool:
    return name.split(".", maxsplit=1)[0] in HEAVY


def test_the_test_of_circles_sees_one(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    modules = {
        "a": "from shardctl.b import B\n",
        "b": "def f():\n    from shardctl import c\n",
        "c": "import shardctl.a\n",
    }
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(CycleError):
        list(TopologicalSorter(graph(sorted(tmp_path.glob("*.py")))).static_order())


def test_the_test_itself_sees_what_it_should(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "models").mkdir()
    module = tmp_path / "models" / "x.py"
    module.write_text(
        "from typing import TYPE_CHECKING\n"
        "from shardctl.tensors.box import Box\n"
        "from shardctl.models.y import Y\n"
        "from shardctl import libraries\n"
        "if TYPE_CHECKING:\n    import torch\n    from shardctl.verbs import plan\n"
        "else:\n    import transformers\n"
        "def f():\n    import shardctl.cli\n    import torch\n"
    )
    assert violations(module) == [
        "models/x.py:4: models imports libraries",
        "models/x.py:7: models imports verbs",
        "models/x.py:11: models imports cli",
    ]
    assert [n for n, _, runs in imports(module) if runs and n.split(".")[0] in HEAVY] == ["transformers"]
