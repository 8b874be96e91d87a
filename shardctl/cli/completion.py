"""Completes command lines: prints the scripts for bash, zsh and fish, and answers what they ask."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args, get_origin

import typer

from shardctl.base.value import value_class
from shardctl.cli import streams
from shardctl.cli.short_help import ALL, split_first_sentence

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

ASK: Final = "_complete"
"""What a script begins its question with: the shell, then the words up to the cursor, the last of which is not over."""
FILES: Final = ":files"
"""The answer that the shell is to list files."""
_SUPPORTED_SHELLS: Final = ("bash", "zsh", "fish")
_PATH_METAVARS: Final = ("SRC", "DST", "PATH", "FILE", "DIR", "BASE", "A", "B")
"""What stands in help for a path."""
_ANNOTATED_ARGS_COUNT: Final = 2

_BASH_SCRIPT: Final = r"""# Completes shardctl in bash. In ~/.bashrc:  eval "$(shardctl completion bash)"
_shardctl() {
    local line
    COMPREPLY=()
    while IFS= read -r line; do
        case $line in
            :files) return ;;
            ?*) COMPREPLY+=("${line%%$'\t'*}") ;;
        esac
    done < <("$1" _complete bash "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    [ ${#COMPREPLY[@]} -gt 0 ] || compopt +o default +o bashdefault 2>/dev/null
}
complete -o bashdefault -o default -F _shardctl shardctl
"""
_ZSH_SCRIPT: Final = r"""#compdef shardctl
# Completes shardctl in zsh. In ~/.zshrc, after compinit:  eval "$(shardctl completion zsh)"
_shardctl() {
    local line
    local -a found
    for line in "${(@f)$("${words[1]}" _complete zsh "${(@)words[2,CURRENT]}" 2>/dev/null)}"; do
        case $line in
            :files) compset -P '--*='; _files; return ;;
            ?*) found+=("${${line%%$'\t'*}//:/\\:}:${line#*$'\t'}") ;;
        esac
    done
    (( ${#found} )) && _describe -V 'shardctl' found
}
if [ "$funcstack[1]" = "_shardctl" ]; then
    _shardctl "$@"
else
    compdef _shardctl shardctl
fi
"""
_FISH: Final = r"""# Completes shardctl in fish:  shardctl completion fish > ~/.config/fish/completions/shardctl.fish
function __shardctl_complete
    set -l before (commandline -opc)
    set -l current (commandline -ct)
    set -l found ($before[1] _complete fish $before[2..-1] "$current" 2>/dev/null)
    if test "$found[1]" = ":files"
        __fish_complete_path (string replace -r '^--[^=]*=' '' -- "$current")
    else
        printf '%s\n' $found
    end
end
complete -c shardctl -f -a '(__shardctl_complete)'
"""
_COMPLETION_SCRIPTS: Final = {"bash": _BASH_SCRIPT, "zsh": _ZSH_SCRIPT, "fish": _FISH}

EXAMPLES = """
Examples:
  eval "$(shardctl completion bash)"
  shardctl completion fish > ~/.config/fish/completions/shardctl.fish
"""


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(show_default=False, help="Which shell asks.")],
) -> int:
    """Print a script that lets a shell complete verbs, options, formats, devices and paths."""
    streams.print_text(_COMPLETION_SCRIPTS[shell])
    return 0


@value_class
class _KnownOption:
    """What can follow an option."""

    help: str
    is_flag: bool
    is_place: bool
    words: tuple[str, ...]


def answer_shell(verbs: Mapping[str, Callable[..., Any]], asked: Sequence[str]) -> str:
    """Answer a script: a line for each word that can stand at the cursor, with its help after a tab, or `FILES`."""
    shell, *words = asked
    before, current = list(words[:-1]), words[-1] if words else ""
    before, current, prefix = _join_equals(before, current) if shell == "bash" else (before, current, "")
    if shell != "bash" and current.startswith("--") and "=" in current:
        option, _, current = current.partition("=")
        before, prefix = [*before, option], f"{option}="
    found = _list_candidates(verbs, before, current)
    if found is None:
        return f"{FILES}\n"
    return "".join(f"{prefix}{word}\t{text}\n" for word, text in found.items() if word.startswith(current))


def _join_equals(before: list[str], current: str) -> tuple[list[str], str, str]:
    """Undo what bash does with `--to=ranks`, which it takes for three words."""
    if current == "=":
        return before, "", ""
    joined = [word for place, word in enumerate(before) if word != "=" or not before[place - 1].startswith("--")]
    return joined, current, ""


def _list_candidates(
    verbs: Mapping[str, Callable[..., Any]], before: Sequence[str], current: str
) -> dict[str, str] | None:
    """List the words that can follow, with their help; None for a path."""
    verb = next((word for word in before if word in verbs), None)
    if verb is None:
        texts = {name: split_first_sentence(inspect.getdoc(each) or "") for name, each in verbs.items()}
        if before == ["help"]:
            return texts
        globals_ = {"--help": "Show this message", "--version": "Print the version"}
        return globals_ if current.startswith("-") else texts | {"help": "Show the help of a verb"}
    options, arguments = _read_signature(verbs[verb])
    last = before[-1]
    if "--" not in before:
        if last in options and not options[last].is_flag:
            return None if options[last].is_place else dict.fromkeys(options[last].words, "")
        if current.startswith("-"):
            helps = {"--help": "Show what most people need", ALL: "Show every option"}
            return {name: option.help for name, option in options.items()} | helps
    return dict.fromkeys(arguments, "") if arguments else None


def _read_signature(function: Callable[..., Any]) -> tuple[dict[str, _KnownOption], tuple[str, ...]]:
    """Read the options of a verb, and the words that its argument must be one of, if it is no path."""
    options: dict[str, _KnownOption] = {}
    choices: tuple[str, ...] = ()
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        annotation, info = parameter.annotation, parameter.default
        if get_origin(annotation) is Annotated:
            annotation, info = get_args(annotation)[:_ANNOTATED_ARGS_COUNT]
        if isinstance(info, typer.models.ArgumentInfo):
            choices = choices or _list_choices(annotation)
        elif isinstance(info, typer.models.OptionInfo):
            known = info.autocompletion
            words = tuple(known()) if known is not None else _list_choices(annotation)
            place = (info.metavar or "").partition(".")[0] in _PATH_METAVARS or Path in _unpack_union(annotation)
            option = _KnownOption(split_first_sentence(info.help or ""), annotation is bool, place, words)
            options |= {flag: option for flag in info.param_decls or () if flag.startswith("-")}
    return options, choices


def _list_choices(annotation: object) -> tuple[str, ...]:
    """List the texts of a `Literal`, also of one that may be None."""
    return tuple(each for part in _unpack_union(annotation) if get_origin(part) is Literal for each in get_args(part))


def _unpack_union(annotation: object) -> tuple[object, ...]:
    if get_origin(annotation) in {Literal, None}:
        return (annotation,)
    return tuple(inner for part in get_args(annotation) for inner in _unpack_union(part))
