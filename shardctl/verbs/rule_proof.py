"""Proves derived rules with a small model of the same class before they are used, in a process of its own.

The child (`small_proof.py`) has torch and transformers; neither their memory nor their threads stay.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, Literal

from shardctl.base.amounts import format_file_size
from shardctl.base.errors import Mismatch
from shardctl.base.limited_child import run_limited_child
from shardctl.base.value import value_class
from shardctl.models import ModelConfig, find_quantization_config
from shardctl.models.names.hub.conversion_table import find_class_name, knows_class

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.conversion.conversion_plan import PlannedConversion
    from shardctl.models.derived import RuleDerivation
    from shardctl.options import SourceOptions
    from shardctl.tensors.mesh import Mesh

_MAX_SECONDS: Final = 30
"""Seconds that a proof may take: importing torch and transformers takes most of what it usually needs, about ten."""
_NEEDED_MEMORY: Final = 600 << 20
"""Bytes that torch, transformers and a small model take at least; measured 330 MB to 480 MB."""
_CHILD_MODULE: Final = "shardctl.verbs.small_proof"
_WRONG_RULES_HINT: Final = "save the rules with inspect --show-rules, correct them, and give them with --rules"


@value_class
class RuleProof:
    """What a small model showed of derived rules."""

    status: Literal["proved", "not proved"]
    reason: str = ""
    """Why nothing was proved."""

    def describe(self) -> str:
        """Return it as the record has it."""
        return f"rules {self.status}: {self.reason}" if self.reason else f"rules {self.status}: small model"


def prove_rules(work: PlannedConversion, source_options: SourceOptions) -> RuleProof | None:
    """Prove the derived rules that a conversion uses; None if it uses none.

    Raises Mismatch if ranks of a small model that are cut by them compute something else than the model.
    """
    mesh, checkpoint = work.mesh, work.checkpoint
    model = checkpoint.find_placement(mesh) if checkpoint.model is None else None
    if model is None or model.derivation is None or checkpoint.config is None or "rules" not in work.options:
        return None
    config = checkpoint.config
    missing = next((name for name in ("torch", "transformers") if find_spec(name) is None), None)
    architecture = ModelConfig(config).architecture()
    if missing is not None:
        return RuleProof("not proved", f"{missing} is not installed")
    if find_quantization_config(config) is not None:
        return RuleProof("not proved", "a model with quantized weights cannot be run here")
    if not knows_class(architecture, config):
        return RuleProof("not proved", f"transformers has no class {architecture or 'for this config'}")
    memory = work.reshard_options.host_memory
    if memory < _NEEDED_MEMORY:
        return RuleProof(
            "not proved",
            f"it needs {format_file_size(_NEEDED_MEMORY)}, and --memory is {format_file_size(memory)}",
        )
    request = {
        "architecture": architecture,
        "class": find_class_name(architecture, config),
        "config": dict(config),
        "rules": sorted(list_rule_axes(model.derivation)),
        "meshes": list(_choose_axes(mesh)),
        "kv_heads": source_options.kv_heads,
        "rules_from": source_options.rules_from,
    }
    return _run_child(json.dumps(request), memory)


def _choose_axes(mesh: Mesh) -> Iterator[str]:
    """Yield the axes that are proved, one after the other."""
    if mesh.degree("tp") > 1 or mesh.degree("etp") > 1:
        yield "tp"
    if mesh.degree("ep") > 1:
        yield "ep"


def list_rule_axes(derivation: RuleDerivation) -> set[str]:
    """List each pattern with the axes that cut each dim and how many sections each has: what sizes do not change."""
    return {
        f"{each.pattern} {[[(cut.axis, len(cut.sections)) for cut in dim] for dim in each.rule.cuts]}"
        for each in derivation.rules
    }


def _run_child(request: str, memory: int) -> RuleProof:
    """Run the proof, and end it if it takes too long or too much memory."""
    found = run_limited_child(
        _CHILD_MODULE,
        request,
        memory=memory,
        seconds=_MAX_SECONDS,
        task="a small model",
        limit=f"--memory {format_file_size(memory)}",
    )
    if isinstance(found, str):
        return RuleProof("not proved", found)
    if found["status"] == "failed":
        raise Mismatch(
            f"the derived rules are wrong: ranks of a small model of the same class do not compute what it computes: "
            f"{found['reason']}",
            hint=_WRONG_RULES_HINT,
        )
    return RuleProof(found["status"], found["reason"])
