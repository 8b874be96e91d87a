"""Formats a derived table as a rule file, which can be saved, edited and given with `--rules`."""

from __future__ import annotations

import json
from itertools import groupby
from typing import TYPE_CHECKING

from shardctl.models.rules.rule_cuts import format_cut

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.models.derived.derivation import RuleDerivation, TensorRule


def format_rule_file(derivation: RuleDerivation) -> str:
    """Format a rule file that says the same; comments say where rules come from, and why the rest is whole."""
    return "\n".join(_list_lines(derivation)) + "\n"


def _list_lines(derivation: RuleDerivation) -> Iterator[str]:
    yield f"# Rules derived for {derivation.architecture or 'a model'}, which shardctl has no table for."
    yield "# They are not proved: reshard --prove or verify --forward does that."
    yield "[rules]"
    for origin, rules in groupby(derivation.rules, key=lambda each: each.rule.origin):
        yield f"# from {origin}"
        for each in rules:
            note = f"  # {each.rule.note}" if each.rule.note else ""
            yield f"{json.dumps(each.pattern)} = {_format_rule(each.rule)}{note}"
    if derivation.uncut:
        yield "# whole, because it is not known how to cut them"
    for uncut in derivation.uncut:
        yield f'{json.dumps(uncut.pattern)} = ["fsdp"]  # {uncut.reason}'
    yield '"**" = ["fsdp"]  # norms, biases of sums, routers and the like are whole on every tp rank'
    if derivation.experts:
        yield from ("", "[experts]", f"pattern = {json.dumps(list(derivation.experts))}")


def _format_rule(rule: TensorRule) -> str:
    """Return each dim as a rule file says it; fsdp cuts what is left of the first."""
    if not rule.cuts:
        return "[]"
    dims = [[format_cut(cut) for cut in dim] for dim in rule.cuts]
    dims[0].append("fsdp")
    while len(dims) > 1 and not dims[-1]:
        dims.pop()
    return json.dumps([dim[0] if len(dim) == 1 else dim or "" for dim in dims])
