"""Answers whether a small model of a class proves derived rules: the process that `rule_proof.py` starts.

It makes the model, derives its rules, cuts it in two, and compares the ranks with the model, as `reshard --prove` does
with a real result.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardctl.base.errors import Mismatch, ShardctlError
from shardctl.base.limited_child import REQUEST_FILE, write_child_result
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.options import DestinationOptions, ReshardOptions, SourceOptions
from shardctl.running.small_model import save_small_model
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.reshard import reshard
from shardctl.verbs.rule_proof import list_rule_axes
from shardctl.verify.transformers_classes import get_model_class

if TYPE_CHECKING:
    from collections.abc import Mapping


def prove_small_model(request: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Make a small model with the stored names of the real one, and prove the same rules."""
    kind, unlike = get_model_class(request["class"]), ""
    options = SourceOptions(kv_heads=request["kv_heads"], rules_from=request["rules_from"])
    meshes = {"tp": Mesh.of(tp=2), "ep": Mesh.of(dp=2, ep=2)}
    for in_memory in (False, True):
        source = folder / f"source{in_memory:d}"
        source.mkdir()
        try:
            save_small_model(kind, request["config"], source, in_memory=in_memory)
            written = json.loads((source / "config.json").read_text(encoding="utf-8"))
            written["architectures"] = [request["architecture"]]  # which may be the Hub's own code
            (source / "config.json").write_text(json.dumps(written), encoding="utf-8")
        except Exception as error:  # noqa: BLE001 - whatever a class raises that small sizes do not suit
            said = " ".join(str(error).split())
            return {"status": "not proved", "reason": f"{request['class']} cannot be made small: {said:.200}"}
        with open_checkpoint(source, options) as checkpoint:
            model = checkpoint.find_placement(meshes[request["meshes"][0]])
        held = list_rule_axes(model.derivation) if model is not None and model.derivation is not None else set()
        others = [cut for cut in request["rules"] if cut not in held]
        if others:
            unlike = unlike or others[0].partition(" ")[0]
            continue
        for axis in request["meshes"]:
            proving = DestinationOptions(prove=True)
            ranks, wanted = folder / f"ranks-{axis}", ReshardOptions(mesh=meshes[axis])
            reshard(source, ranks, wanted, source_options=options, destination_options=proving)
        return {"status": "proved", "reason": ""}
    return {"status": "not proved", "reason": f"a small model has no rule like that of {unlike}"}


def main() -> None:
    """Answer the request in a folder."""
    folder = Path(sys.argv[1])
    request = json.loads((folder / REQUEST_FILE).read_text(encoding="utf-8"))
    try:
        found = prove_small_model(request, folder)
    except Mismatch as error:
        found = {"status": "failed", "reason": error.message}
    except ShardctlError as error:
        found = {"status": "not proved", "reason": error.message}
    write_child_result(folder, found)


if __name__ == "__main__":
    main()
