"""Plans the models that people deploy, from their configs alone, at tp 8 on an H200.

python docs/benchmarks/public_configs.py [FOLDER] > docs/benchmarks/public_configs.md

The configs are those of the package aiconfigurator-core (Apache-2.0), which is found where it is installed and not
imported, or any folder of files called `OWNER--NAME_config.json`. What `OWNER--NAME_hf_quant_config.json` says of how
weights are quantized lies beside the config, as on the Hub.
"""

import shutil
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from measuring import ROOT, name_state

from shardctl.api import Mesh, PlanOptions, ReshardOptions, plan
from shardctl.base.errors import ShardctlError
from shardctl.options.plan_options import find_device

PACKAGE = "aiconfigurator_core"
CONFIG, QUANTIZATION = "_config.json", "_hf_quant_config.json"
GIB = 1 << 30


def find_folder():
    """The folder of the configs: what is given, else that of the installed package."""
    if len(sys.argv) > 1:
        return Path(sys.argv[1])
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{PACKAGE} is not installed; name a folder of configs")
    return Path(spec.submodule_search_locations[0]) / "model_configs"


def plan_config(path):
    """The cells of a model's row: its parameters, what each rank holds and needs, or why there is no plan."""
    with tempfile.TemporaryDirectory() as place:
        shutil.copy(path, Path(place, "config.json"))
        beside = path.with_name(path.name.removesuffix(CONFIG) + QUANTIZATION)
        if beside.exists():
            shutil.copy(beside, Path(place, "hf_quant_config.json"))
        began = time.perf_counter()
        try:
            found = plan(
                place, ReshardOptions(mesh=Mesh.of(tp=8)), plan_options=PlanOptions(device=find_device("h200"))
            )
        except ShardctlError as error:
            why = error.message.replace(place, path.name).partition(f", and {path.name}")[0]
            hint = f"; {error.hint}" if error.hint else ""
            return False, ("", "", f"refused: {why}{hint}", f"{time.perf_counter() - began:.1f}")
        took = time.perf_counter() - began
    estimate = found.forecast.estimate
    weights = max(rank.weight_bytes for rank in found.ranks) / GIB
    needs = "weights only" if found.forecast.work is None else f"{estimate.binding.total().nbytes / GIB:.1f}"
    return True, (f"{found.parameters / 1e9:.2f}", f"{weights:.2f}", needs, f"{took:.1f}")


def main():
    """Print the page."""
    folder = find_folder()
    paths = sorted(path for path in folder.glob(f"*{CONFIG}") if not path.name.endswith(QUANTIZATION))
    rows = [(path.name.removesuffix(CONFIG).replace("--", "/"), *plan_config(path)) for path in paths]
    try:
        whose = f" {version(PACKAGE.replace('_', '-'))}"
    except PackageNotFoundError:
        whose = ""
    planned = sum(ok for _, ok, _ in rows)
    print("# Public models\n")
    print("`python docs/benchmarks/public_configs.py` writes this page. It plans the")
    print(f"{len(rows)} configs of aiconfigurator-core{whose} with `--tp 8 --gpu h200`; {planned} are planned.")
    print("The columns are the parameters in billions, the GiB of weights on the rank that has most, the GiB")
    print("that this rank needs to serve one sequence, and the seconds that planning takes.")
    print(f"All rows are of one state of the program, {name_state(ROOT)['commit']}.\n")
    print("| model | parameters | weights | needs | seconds |\n|---|---:|---:|---|---:|")
    for name, _, cells in rows:
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
