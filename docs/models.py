"""Writes docs/models.md from the families that shardctl knows: python docs/models.py > docs/models.md."""

import ast
from collections import defaultdict
from pathlib import Path

from shardctl.models import load_families

PACKAGE = Path(__file__).parents[1] / "shardctl"
NAMING = ("libraries", "models/names", "models/submodels", "estimate", "running")
"""Where modules may treat a family by its name; all else knows families by their tables alone."""


def list_naming_modules() -> dict[str, list[str]]:
    """List by family the modules that have its name as a string of its own."""
    families = {family.name for family in load_families()}
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(path for folder in NAMING for path in (PACKAGE / folder).rglob("*.py")):
        strings = {
            node.value
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        for family in families & strings:
            found[family].append(path.relative_to(PACKAGE).with_suffix("").as_posix())
    return found


def page() -> str:
    """The page, as text."""
    known, modules = load_families(), list_naming_modules()
    lines = [
        "# Models",
        "",
        f"shardctl knows {len(known)} families of models. The table lists each by the `model_type` of its configs,",
        "with the classes that it describes. These are classes of transformers; if transformers has none, they are",
        "the names that configs on the Hub use. `python docs/models.py` writes this page from",
        "`shardctl/models/families`.",
        "",
        "| model_type | classes |",
        "|---|---|",
    ]
    families = sorted(known, key=lambda f: f.name.lower())
    unnamed = sum(family.name not in modules for family in families)
    lines += [f"| `{family.name}` | {', '.join(f'`{name}`' for name in family.classes)} |" for family in families]
    lines += [
        "",
        "## Modules that treat a family by its name",
        "",
        "The table of a family is in `shardctl/models/families`, and most of shardctl knows it by that alone.",
        "These modules name it, because a library has a class, a name or an argument of its own for it. Look here",
        f"before you change a family. {unnamed} families are named nowhere else.",
        "",
        "| model_type | modules below `shardctl/` |",
        "|---|---|",
    ]
    named = [family.name for family in families if family.name in modules]
    lines += [f"| `{name}` | {', '.join(f'`{module}`' for module in modules[name])} |" for name in named]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
