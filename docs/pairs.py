"""Writes the table of docs/formats.md that says which format goes to which layout: python docs/pairs.py.

Every cell is a conversion that was made here and whose digest was compared, or the refusal that it met. The models are
those of fixtures: a Llama, and a DeepSeek-V3 for the layout that holds nothing else.
"""

import json
import re
import sys
import tempfile
from pathlib import Path

from shardctl.api import Mesh, ReshardOptions, ShardctlError, SourceOptions, digest, reshard
from shardctl.libraries.catalogue import load_layouts

ROOT = Path(__file__).parent
LLAMA = ROOT.parent / "fixtures/trtllm/llama_pp3/source"
ORBAX = ROOT.parent / "fixtures/orbax/ocdbt"
"""The same Llama, written by Orbax under a JAX library's names, which the rule file beside it translates."""
DEEPSEEK = ROOT.parent / "fixtures/deepseek_mp/bf16/source"
PAGE = ROOT / "formats.md"
BEGIN, END = "<!-- pairs: python docs/pairs.py -->\n", "<!-- end of pairs -->\n"
LAYOUTS = load_layouts()
NAMES = tuple(layout.name for layout in LAYOUTS)
CUT = {layout.name for layout in LAYOUTS if layout.ranks != "none"}
"""Layouts that have ranks: these are written for two."""


_SAID = {
    "torch": "`.bin`, `.pt`, `.pth`",
    "universal": "`universal` (DeepSpeed)",
    "named": "Orbax (with `[names]`)",
}


def converted(source: Path, config: Path, layout: str, folder: Path) -> str:
    """An empty text if `source` became a checkpoint of the same digest, else why not."""
    mesh = Mesh.of(tp=2) if layout in CUT else None
    source_options = SourceOptions(config=config)
    rules = ORBAX.parent / "names.toml" if source == ORBAX else None
    try:
        reshard(
            source,
            folder,
            ReshardOptions(to=layout, mesh=mesh),
            source_options=SourceOptions(config=config, rules=rules),
        )
    except ShardctlError as error:
        return str(error.message)
    found, expected = digest(folder, source_options=source_options).digest, digest(config.parent).digest
    if found != expected:
        raise AssertionError(f"{source} to {layout}: {found}, not {expected}")
    return ""


def torch_saved(source: Path, folder: Path) -> None:
    """A checkpoint as `save_pretrained(safe_serialization=False)` of older versions wrote it."""
    import torch
    from safetensors.torch import load_file

    folder.mkdir()
    torch.save(load_file(source / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())


def cells(folder: Path):
    """By format read and layout written: an empty text, or the reason of a refusal."""
    found = {}
    for model in (LLAMA, DEEPSEEK):
        config = model / "config.json"
        sources = {"hf": model, "torch": folder / f"{model.parent.name}-torch"}
        torch_saved(model, sources["torch"])
        for layout in NAMES:
            made = folder / f"{model.parent.name}-{layout}"
            if layout not in sources and not converted(model, config, layout, made):
                sources[layout] = made
        if model == LLAMA:
            sources["named"] = ORBAX
        for name, source in sources.items():
            for layout in NAMES:
                if found.get((name, layout)) == "":
                    continue
                wrong = converted(source, config, layout, folder / f"{model.parent.name}-{name}-to-{layout}")
                if (name, layout) not in found or not wrong:
                    found[name, layout] = wrong
    return found


def table(found) -> str:
    """The table, with the reasons of refusals under it."""
    rows = list(dict.fromkeys(name for name, _ in found))
    reasons: dict[str, int] = {}
    lines = [
        f"| read \\ written | {' | '.join(f'`{layout}`' for layout in NAMES)} |",
        "|---" * (len(NAMES) + 1) + "|",
    ]
    for name in rows:
        marks = []
        for layout in NAMES:
            wrong = found[name, layout]
            marks.append("yes" if not wrong else f"[{reasons.setdefault(wrong, len(reasons) + 1)}]")
        lines.append(f"| {_SAID.get(name, f'`{name}`')} | {' | '.join(marks)} |")
    notes = [f"[{number}] {reason}" for reason, number in reasons.items()]
    return "\n".join(lines) + "\n" + ("\n" + "  \n".join(notes) + "\n" if notes else "")


def page() -> str:
    """docs/formats.md, with the table as it is now."""
    with tempfile.TemporaryDirectory() as folder:
        made = table(cells(Path(folder)))
    return re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n{made}\n{END}", PAGE.read_text(), flags=re.DOTALL)


if __name__ == "__main__":
    if sys.argv[1:] == ["--json"]:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps({" to ".join(pair): wrong for pair, wrong in cells(Path(folder)).items()}, indent=1))
    else:
        PAGE.write_text(page())
