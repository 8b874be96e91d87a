"""Writes docs/models.md from the families that shardctl knows: python docs/models.py > docs/models.md."""

from shardctl.models import load_families


def page():
    """The page, as text."""
    known = load_families()
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
    rows = (f"| `{family.name}` | {', '.join(f'`{name}`' for name in family.classes)} |" for family in families)
    return "\n".join([*lines, *rows]) + "\n"


if __name__ == "__main__":
    print(page(), end="")
