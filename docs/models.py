"""Writes docs/models.md from the families that shardctl knows: python docs/models.py > docs/models.md."""

from shardctl.models import FAMILIES


def page():
    """The page, as text."""
    lines = [
        "# Models",
        "",
        f"{len(FAMILIES)} families, by the `model_type` of a config, with the classes each describes: those of",
        "transformers, or those that configs on the Hub name where transformers has none.",
        "Written by `python docs/models.py` from `shardctl/models/families`; a test holds the two together.",
        "",
        "| model_type | classes |",
        "|---|---|",
    ]
    families = sorted(FAMILIES, key=lambda f: f.name.lower())
    rows = (f"| `{family.name}` | {', '.join(f'`{name}`' for name in family.classes)} |" for family in families)
    return "\n".join([*lines, *rows]) + "\n"


if __name__ == "__main__":
    print(page(), end="")
