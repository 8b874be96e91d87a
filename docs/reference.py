"""Writes command-line.md from the declarations of the options, json.md from the schemas, and a table of glossary.md.

    python docs/reference.py

A test compares the pages with what this script makes.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import typer

sys.path.insert(0, str(Path(__file__).parent))
from man_pages import list_parameters, list_values

from shardctl.cli import foreign_words
from shardctl.cli.app import FUNCTIONS, app
from shardctl.libraries.catalogue import list_choices
from shardctl.report.schemas import build_schema

DOCS = Path(__file__).parent
BEGIN, END = "<!-- words: python docs/reference.py writes these -->", "<!-- end of words -->"
FORMER = ("--dcp", "--towers", "--beside")
"""Former names of options, which are not words of other tools."""

COMMAND_LINE = """\
# Command line

`shardctl VERB --help` shows the options that most people need, `shardctl VERB --help-all` shows all of them, and `-h`
shows one line each. The [exit code](exit-codes.md) is the answer. `python docs/reference.py` writes this page from the
declarations of the options.

- A source (`SRC`) is a path, `owner/name` on the Hub, or an `s3://`, `gs://` or `az://` address.
- Every option can also be set in a file or a variable. `shardctl settings` prints those in force
  ([guide](guide.md#set-options-in-a-file-and-say-less-or-more)).
- `--version` stands before the verb.
"""

JSON = """\
# JSON

With `--json` a verb prints one JSON document to stdout. `shardctl schema VERB` prints its JSON Schema (draft 2020-12):

```text
shardctl schema verify > verify.schema.json
```

- `schema` names the document and its version.
- `status` is `ok`, `no` or `error`, and `exit_code` repeats the [exit code](exit-codes.md).
- A run that fails ends with the [failure document](#failuredocument), which has `error` and `hint`.
- A name that ends in `_bytes` counts bytes. A key that is marked "optional" may be absent.

`python docs/reference.py` writes this page from the schemas.
"""


def escape(text: str) -> str:
    """Text as a cell of a table has it."""
    for word, names in list_choices().items():
        text = text.replace(f"{{{word}}}", names)
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;").replace("*", "\\*")


def format_option(kind: Any, info: Any, aliases: dict[str, list[str]]) -> str:
    """Format the row of an option: its flags, what it takes, and its help."""
    takes = "" if kind is bool else escape(info.metavar or "|".join(list_values(kind)) or "TEXT")
    flags = ", ".join(f"`{flag}`" for flag in info.param_decls if flag.startswith("-"))
    others = [
        f"`{alias.partition('=')[0]}`" + (f" (`{alias.partition('=')[2]}`)" if "=" in alias else "")
        for flag in info.param_decls
        for alias in aliases.get(flag, [])
    ]
    default = info.default
    shown = f" Default: {default}." if default not in {None, False, (), ...} and "Default:" not in info.help else ""
    also = f" Also: {', '.join(others)}." if others else ""
    return f"| {flags} | {takes} | {escape(info.help + shown)}{also} |"


def format_verb(name: str, function: Any, examples: str) -> list[str]:
    """Format the section of a verb: its arguments, its examples, and a table for each group of options."""
    parameters = list(list_parameters(function))
    arguments = [info for _, info in parameters if isinstance(info, typer.models.ArgumentInfo)]
    words = " ".join(info.metavar or "SHELL" for info in arguments)
    lines = [f"## shardctl {name}", "", " ".join((inspect.getdoc(function) or "").split()), ""]
    lines += ["```text", f"shardctl {name} [OPTIONS] {words}".rstrip(), "```", ""]
    lines += [f"- `{info.metavar or 'SHELL'}`: {escape(info.help or '')}" for info in arguments] + [""]
    if commands := examples.strip().partition("\n")[2]:
        lines += ["```text", *(line.strip() for line in commands.strip().split("\n")), "```", ""]
    declared = getattr(FUNCTIONS.get(name), "declared", {})
    aliases = {flag: list(option.aliases) for flag, option in declared.items() if option.aliases}
    panels: dict[str, list[str]] = {}
    for kind, info in parameters:
        if isinstance(info, typer.models.OptionInfo) and not info.hidden:
            panels.setdefault(str(info.rich_help_panel or "Options"), []).append(format_option(kind, info, aliases))
    for panel, rows in panels.items():
        title = f"{panel} of {name}" if panel != "Options" else f"Options of {name}"
        lines += [f"### {title}", "", "| option | takes | meaning |", "|---|---|---|", *rows, ""]
    return lines


def build_command_line() -> str:
    """Build the page of all verbs and options."""
    lines = COMMAND_LINE.split("\n")
    for each in app.registered_commands:
        lines += format_verb(str(each.name), each.callback, each.epilog or "")
    return "\n".join(lines).rstrip() + "\n"


def describe_type(kind: Any, known: dict[str, str]) -> str:  # noqa: PLR0911 - one a kind
    """Describe the type of a value in few words."""
    if not isinstance(kind, dict) or not kind:
        return "any"
    if "$ref" in kind:
        name = kind["$ref"].rpartition("/")[2]
        return f"[{name}](#{known[name]})" if name in known else name
    for several in ("anyOf", "oneOf"):
        if several in kind:
            return " or ".join(describe_type(one, known) for one in kind[several])
    if "const" in kind:
        return f"`{kind['const']}`"
    if "enum" in kind:
        return ", ".join(f"`{one}`" if isinstance(one, str) else f"`{str(one).lower()}`" for one in kind["enum"])
    if isinstance(kind.get("type"), list):
        return " or ".join(kind["type"])
    if kind.get("type") == "array":
        return f"list of {describe_type(kind.get('items', {}), known)}"
    if kind.get("type") == "object" and isinstance(kind.get("additionalProperties"), dict):
        return f"object of {describe_type(kind['additionalProperties'], known)}"
    return str(kind.get("type", "any"))


def list_fields(kind: dict[str, Any], known: dict[str, str], prefix: str = "") -> list[str]:
    """List a row for each key of an object, and for those of the objects inside it that have no name."""
    rows = []
    required = kind.get("required", ())
    for name, value in kind.get("properties", {}).items():
        meaning = escape(value.get("description", ""))
        optional = "" if name in required else "optional" + ("; " if meaning else "")
        rows.append(f"| `{prefix}{name}` | {describe_type(value, known)} | {optional}{meaning} |")
        for inner in [value, value.get("items", {}), *value.get("anyOf", ())]:
            mark = "[]" if inner is value.get("items") else ""
            if "properties" in inner:
                rows += list_fields(inner, known, f"{prefix}{name}{mark}.")
    return rows


def format_object(title: str, kind: dict[str, Any], known: dict[str, str]) -> list[str]:
    """Format a section with the keys of an object."""
    lines = [f"### {title}", ""]
    if kind.get("description"):
        lines += [escape(kind["description"]), ""]
    return [*lines, "| key | type | meaning |", "|---|---|---|", *list_fields(kind, known), ""]


def build_json() -> str:
    """Build the page of all documents: those of each verb, then the objects that they share."""
    verbs = ["plan", "reshard", "finish", "verify", "attest", "inspect", "diff", "digest", "settings"]
    schemas = {verb: build_schema(verb) for verb in verbs}
    parts: dict[str, list[tuple[str, str, dict[str, Any]]]] = {verb: [] for verb in [*verbs, "all"]}
    named: dict[str, dict[str, str]] = {verb: {} for verb in verbs}
    for verb, schema in schemas.items():
        for name, kind in schema["$defs"].items():
            if verb == "plan" and name in {"failure", "bytes", "count"}:
                continue
            users = [each for each in verbs if name in schemas[each]["$defs"]]
            owner = "all" if len(users) > 1 else verb
            title = f"plan.{name}" if verb == "plan" else name
            named[verb][name] = re.sub(r"[^\w-]", "", title.lower())
            if owner == "all" and "schema" in kind.get("properties", {}):
                names = [schemas[each]["$defs"][name]["properties"]["schema"]["const"] for each in users]
                kind = kind | {"properties": kind["properties"] | {"schema": {"enum": names}}}  # noqa: PLW2901
            if "properties" in kind and name not in [one for _, one, _ in parts[owner]]:
                parts[owner].append((title, name, kind))
    lines = JSON.split("\n")
    for verb, schema in schemas.items():
        alternatives = schema.get("oneOf") or schema.get("anyOf") or [schema]
        top = [one["$ref"].rpartition("/")[2] for one in alternatives if "$ref" in one]
        links = [f"[{one}](#{named[verb][one]})" for one in top if one in named[verb]]
        lines += [f"## {verb}", "", f"`{schema['$id']}`: {', '.join(links)}.", ""]
        for title, _, kind in sorted(parts[verb], key=lambda part: part[1] not in top):
            lines += format_object(title, kind, named[verb])
    lines += ["## Shared objects", ""]
    known = {name: anchor for verb in verbs[1:] for name, anchor in named[verb].items()}
    for title, _, kind in parts["all"]:
        lines += format_object(title, kind, known)
    return "\n".join(lines).rstrip() + "\n"


def list_words() -> list[str]:
    """List what other tools call an option or a verb, with its name here and whether it is taken as it is."""
    taken: dict[str, list[str]] = {}
    for flag, option in FUNCTIONS["plan"].declared.items():
        for alias in option.aliases:
            name, _, value = alias.partition("=")
            if alias not in FORMER:
                taken.setdefault(f"`{flag} {value}".strip() + "`", []).append(f"`{name}`")
    hinted: dict[str, list[str]] = {}
    for word, flag in foreign_words.OPTIONS.items():
        if f"`--{word}`" not in taken.get(f"`{flag}`", ()):
            hinted.setdefault(f"`{flag}`", []).append(f"`--{word}`")
    for word, verb in foreign_words.VERBS.items():
        hinted.setdefault(f"`shardctl {verb}`", []).append(f"`{word}`")
    rows = [
        f"| {name} | {', '.join(taken.get(name, ()))} | {', '.join(dict.fromkeys(hinted.get(name, ())))} |"
        for name in sorted({*taken, *hinted})
    ]
    return ["| shardctl says | taken, too | answered with the name on the left |", "|---|---|---|", *rows]


def build_glossary() -> str:
    """Build the glossary: its own text, with the table of words between the marks."""
    head, _, tail = (DOCS / "glossary.md").read_text(encoding="utf-8").partition(BEGIN)
    return "\n".join([head + BEGIN, "", *list_words(), "", END + tail.partition(END)[2]])


PAGES = {"command-line.md": build_command_line, "json.md": build_json, "glossary.md": build_glossary}

if __name__ == "__main__":
    for name, build in PAGES.items():
        (DOCS / name).write_text(build(), encoding="utf-8")
