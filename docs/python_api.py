"""Writes the options of the command line into the functions of shardctl/api.py, and docs/python.md from these.

    python docs/python_api.py

An option is declared once, in shardctl/options; signatures and docstrings of the Python API repeat it for editors and
`help`, between marks, and a test compares them with what this script writes.
"""

import inspect
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import ForwardRef, Literal, get_args, get_origin

from shardctl.cli.app import VERBS
from shardctl.cli.signature import _read_group
from shardctl.libraries.catalogue import list_choices
from shardctl.options.declaration import DeclaredOption, HelpPanel, read_option
from shardctl.options.keywords import list_alias_keywords, name_keyword
from shardctl.options.plan_options import find_device
from shardctl.options.sizes import parse_price, parse_rate, parse_run_tokens, parse_size, parse_token_count

ROOT = Path(__file__).parents[1]
API = ROOT / "shardctl" / "api.py"
PAGE = ROOT / "docs" / "python.md"
FUNCTIONS = ("plan", "reshard", "verify", "attest", "inspect", "diff", "digest")
RELATED = {"reshard_each": "reshard", "contribute": "reshard", "find_newest": "verify"}
"""Functions with the options of a verb, which their docstrings refer to."""
LEFT_OUT = {
    "json": "to_dict() of the result",
    "report": "what the program writes",
    "junit": "what the program writes",
    "summary": "what the program writes",
    "each": "reshard_each",
    "fail_fast": "reshard_each",
    "worker": "contribute and finish",
    "newest_good": "find_newest",
    "plan": "written by hand: a path, or a plan that was read",
}
"""Options that are no keywords, and what has their place."""
BEGIN, END = "# options: python docs/python_api.py writes these", "# end of options"
OTHERS = ("load", "lens", "finish")
"""Functions without options, which the page describes in their own words."""
WIDTH = 120
OVERLOADS = {
    ("ReshardResult", "    dry_run: bool = False,"): "    dry_run: Literal[False] = False,",
    ("RehearsalResult", "    dry_run: bool = False,"): "    dry_run: Literal[True],",
    ("DigestResult", '    as_: Literal["vllm"] | None = None,'): "    as_: None = None,",
    ("EngineSums", '    as_: Literal["vllm"] | None = None,'): '    as_: Literal["vllm"],',
}
"""How a line of a signature differs in an overload, by what this returns."""
IN_PYTHON = {
    "detail": "How much the text shows: time has the peaks of a training step, zero the stages of ZeRO.",
    "all": "List every difference in the text, not only the first 20.",
    "dry_run": "Check everything and return what would be written, but write nothing.",
    "expect": "The digest that is expected; `ok` of the result says whether it is this one.",
    "tensors": "List every tensor in the text and the JSON of the result.",
    "show_rules": "List the rules in force in the text and the JSON of the result; derived ones as a rule file.",
    "require": "The highest level that must be run for `ok`. Default: all that are named.",
    "as_": "Return the SHA-256 of the arrays that the ranks of this engine hold, as its weight checker has them.",
    "out": "Write the plan to this file, for `reshard(plan=...)`.",
}
"""What Python says of options that the help describes by what the program prints."""
FURTHER = {
    "mesh": ' A text, a dictionary such as {"pp": 2, "tp": 4}, or a Mesh.',
    "gpu": " A dictionary with the keys of such a file, or a DeviceSpec, works too.",
}
"""What keywords take besides."""


def list_options(verb):
    """List the options of a verb that are keywords in Python, in the order of the help."""
    found = {}
    for parameter in inspect.signature(getattr(VERBS[verb], verb), eval_str=True).parameters.values():
        option, group = read_option(parameter.annotation), _read_group(parameter.annotation)
        if option is not None:
            kind = get_args(parameter.annotation)[0]
            found[parameter.name] = DeclaredOption(parameter.name, kind, parameter.default, option), option
        elif group is not None:
            found |= {declared.name: (declared, each) for declared, each in group.options()}
    left = LEFT_OUT.keys() | ({"engine"} if verb == "reshard" else set())
    kept = [each for name, each in found.items() if name not in left and not each[1].hidden]
    return sorted(kept, key=lambda each: list(HelpPanel).index(each[1].panel))


def format_type(declared, option):
    """Format the annotation of a keyword: what the option takes as text, and the objects that Python has for it."""
    if declared.name == "mesh":
        return "str | Mapping[str, int] | Mesh | None"
    if option.parser is find_device:
        return "str | Path | Mapping[str, object] | DeviceSpec | None"
    kinds = []
    annotation = declared.annotation
    parts = [annotation]
    if isinstance(annotation, ForwardRef):
        parts = annotation.__forward_arg__.split(" | ")
    elif get_origin(annotation) not in {None, tuple, Literal}:
        parts = get_args(annotation)
    for each in parts:
        if get_origin(each) is Literal:
            words = ", ".join(f'"{word}"' for word in get_args(each))
            kinds.append(f"Literal[{words}]")
        elif get_origin(each) is tuple:
            inner = get_args(each)[0]
            one = "str | Path" if inner is Path else inner.__name__
            kinds += [one, f"Sequence[{one}]"]
        elif each in {Path, "Path"}:
            kinds += ["str", "Path"]
        else:
            kinds.append("None" if each in {type(None), "None"} else getattr(each, "__name__", each))
    if option.parser in {parse_price, parse_rate, parse_run_tokens, parse_size, parse_token_count}:
        kinds.insert(1, "str")
    return " | ".join(dict.fromkeys(kinds))


def format_default(declared, option):
    """Format the default; sizes as the command line takes them."""
    if option.parser is parse_size and declared.default is not None:
        return f'"{declared.default >> 30}GiB"'
    return f'"{declared.default}"' if isinstance(declared.default, str) else repr(declared.default)


def describe_option(declared, option, names):
    """Describe a keyword in the words of the help, with keywords instead of flags."""
    text = IN_PYTHON.get(name_keyword(declared.flag), option.help) + FURTHER.get(name_keyword(declared.flag), "")
    for word, choices in list_choices().items():
        text = text.replace(f"{{{word}}}", choices)
    text = re.sub(r"[;,]? may be repeated", "; a list gives more than one", text)
    text = re.sub(r" ?Exits? with 3 [^.]*\.", "", text)

    def name_flag(found):
        flag, value = found["flag"], found["value"]
        if name_keyword(flag) not in names:
            return found[0]
        known, own = names[name_keyword(flag)]
        words = [*(own.words() if own.words else ()), *re.findall(r"'([^']*)'", str(known.annotation))]
        if value and value in words:
            return f'{name_keyword(flag)}="{value}"'
        return f"{name_keyword(flag)}{' ' + value if value else ''}"

    text = re.sub(r"(?P<flag>--[a-z][a-z0-9-]*)( (?P<value>[a-z0-9][\w@.-]*\w))?", name_flag, text)
    if "Default:" not in text and declared.default not in (None, False, ()):
        text += f" Default: {format_default(declared, option)}."
    return text


def build_parameters(verb):
    """Build the lines of a signature."""
    lines = []
    for declared, option in list_options(verb):
        kind = format_type(declared, option)
        lines.append(f"    {name_keyword(declared.flag)}: {kind} = {format_default(declared, option)},")
        for alias, meaning in list_alias_keywords(option):
            lines.append(f"    {alias}: {'bool = False' if meaning else f'{kind} = {declared.default!r}'},")
    return lines


def build_sections(verb):
    """Build the lines of a docstring: one section for each group of options."""
    options = list_options(verb)
    names = {name_keyword(declared.flag): (declared, option) for declared, option in options}
    lines, last = [], None
    for declared, option in options:
        if option.panel != last:
            lines += [*([""] if lines else []), f"    {option.panel}:"]
            last = option.panel
        name = name_keyword(declared.flag)
        texts = [f"{name}: {describe_option(declared, option, names)}"]
        for alias, meaning in list_alias_keywords(option):
            same = f'{name}="{meaning}"' if meaning else name
            texts.append(f"{alias}: The same as {same}.")
        for text in texts:
            lines += textwrap.wrap(
                text, WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 12, break_on_hyphens=False,
                break_long_words=False,
            )  # fmt: skip
    return lines


def write_functions(source):
    """Return the source of the API with the options of each verb between its marks, and in its docstring."""
    for name, verb in ({each: each for each in FUNCTIONS} | RELATED).items():
        for found in [*re.finditer(rf"^def {name}\(", source, re.MULTILINE)][::-1]:
            head, tail = source[: found.start()], source[found.start() :]
            opened, closed = tail.index(BEGIN), tail.index(END)
            kind = re.search(r"\) -> (.*?):", tail)[1]
            lines = [OVERLOADS.get((kind, line), line) for line in build_parameters(verb)]
            lines = [line for line in lines if name not in RELATED or not line.startswith("    dry_run")]
            source = head + "\n".join([tail[:opened] + BEGIN, *lines, "    " + tail[closed:]])
        if name in RELATED:
            continue
        start = [*re.finditer(rf"^def {verb}\(", source, re.MULTILINE)][-1].start()
        head, tail = source[:start], source[start:]
        arguments = re.search(r"\n    Arguments:\n(?:        .*\n)+\n", tail)
        errors = tail.index("\n    Errors:\n", arguments.end() - 1)
        source = head + tail[: arguments.end()] + "\n".join(build_sections(verb)) + "\n" + tail[errors:]
    return source


HEAD = """\
# Python

`python docs/python_api.py` writes this page from the docstrings of `shardctl`; `help(shardctl.plan)` shows the same.

{module}

## Results and errors

Every function that has the name of a command, and `contribute`, returns a result. `str(result)` is what its command
prints, `result.to_dict()` what it prints with `--json`, and `result.verdict` the answer in one line. `reshard_each` and
`find_newest` return plain objects with one field for each fact. On failure a `ShardctlError` is raised: its `message`
says what happened, its `hint` what to do, and its `exit_code` is that of the program. Its kinds are in
`shardctl.base.errors`:
`UsageError` (2), `Mismatch` (3), `SourceError` (4), `AccessError` (5), `DestinationError` (6), `TransientError` (7).
`verify` returns what is wrong as `findings` and does not raise. Settings in files and variables are for the command
line only.

## Meshes, devices, sizes

- A mesh is degrees (`tp=4, pp=2`), a text (`mesh="pp=2,tp=4"`), a dictionary (`mesh={{"pp": 2, "tp": 4}}`) or an object
  (`mesh=Mesh.of(pp=2, tp=4)`).
- A device is a name or a size (`gpu="h100"`, `gpu="80GB"`), a file, a dictionary with the keys of
  [such a file](devices.md) (`gpu={{"name": "mine", "memory_gib": 80}}`), or a `DeviceSpec`.
- A size is a text with a unit (`memory="2GiB"`) or a number of bytes.
- Words of Python have one more underscore: `for_`, `from_`, `as_`.

## Progress

`progress=True` shows a bar on stderr. A callable gets a `ProgressUpdate` with `phase`, `done_bytes` of `total_bytes`,
`files_done` of `files`, `kept_bytes` (written by an earlier run) and `place` (the file in work). What it
raises ends the run, and the same call of `reshard` resumes.

```python
shardctl.reshard("llama", "llama-tp2", tp=2, progress=lambda update: print(f"{{update.done_bytes:,}} bytes"))
```

## Option objects

Option objects (`ReshardOptions(mesh=Mesh.of(tp=4))` and the like) work for one more release, with a
DeprecationWarning. An option that is given in both ways is an error. `load`, `lens` and the `source_options_a` and
`source_options_b` of `diff` keep them: two checkpoints may need different options.
"""


def build_function_section(verb):
    """Build the part of the page about one function, from its docstring and its signature."""
    import shardctl.api

    head, *sections = re.split(r"\n(?=[A-Z][A-Za-z ]*:\n)", inspect.getdoc(getattr(shardctl.api, verb)))
    parameters = inspect.signature(getattr(shardctl.api, verb)).parameters
    lines = [f"## shardctl.{'' if verb in shardctl.__all__ else 'api.'}{verb}", "", head.strip(), ""]
    if verb in OTHERS:
        lines[2:2] = ["```python", f"{verb}{inspect.signature(getattr(shardctl.api, verb))}", "```", ""]
    for section in sections:
        title, _, body = section.replace("Raises:", "Errors:").partition(":\n")
        if title == "Example":
            lines += ["```python", textwrap.dedent(body).strip(), "```", ""]
            continue
        rows = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", body, re.MULTILINE)
        columns = ["error", "when"] if title == "Errors" else ["keyword", "default", "meaning"]
        lines += [f"### {title} of {verb}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        for name, text in rows:
            meaning = re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")
            default = parameters[name].default if name in parameters else inspect.Parameter.empty
            shown = "" if default in {None, inspect.Parameter.empty} else f"`{default!r}`"
            cells = [f"`{name}`", meaning] if title == "Errors" else [f"`{name}`", shown, meaning]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return lines


def page():
    """Build the page: what all functions share, then each of them."""
    import shardctl

    module = re.sub(r"((?:^    .*\n|^\n(?=    ))+)", _fence_code, inspect.getdoc(shardctl) + "\n", flags=re.MULTILINE)
    lines = HEAD.format(module=module.strip()).split("\n")
    for name in (*FUNCTIONS, *RELATED, *OTHERS):
        lines += build_function_section(name)
    return "\n".join(lines).rstrip() + "\n"


def _fence_code(found):
    return f"\n```python\n{textwrap.dedent(found[0]).strip()}\n```\n\n"


def format_source(source):
    """Format source as `ruff format` does."""
    command = [Path(sys.executable).parent / "ruff", "format", "--stdin-filename", API, "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True, cwd=ROOT).stdout


if __name__ == "__main__":
    API.write_text(format_source(write_functions(API.read_text())))
    PAGE.write_text(page())
