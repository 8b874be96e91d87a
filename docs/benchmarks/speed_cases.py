"""The cases of `run_all.py`: what is made, which program runs on it, and what is measured beside it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import digest
import effort
import generate
import loading
import many
import numpy as np
import reshard
import training
from measuring import drop_files, measure_direct_write, measure_program, run_shardctl

from shardctl.base.dtype import BY_NAME
from shardctl.libraries.safetensors.header import encode_header
from shardctl.libraries.torch_save.item_writer import build_archive, build_tensor_value
from shardctl.models import describe_model

COLUMNS = """[rules]
"model.layers.*.self_attn.*.weight" = ["", "tp"]
"model.layers.*.mlp.*.weight" = ["", "tp"]
"model.embed_tokens.weight" = ["", "tp"]
"lm_head.weight" = ["", "tp"]
"**" = []
"""
"""Cuts every matrix of a Llama by columns."""
MEMORY = ["--memory", "256MiB"]
TP4 = ["--tp", "4", *MEMORY]
SMALL_SHARDS = ["--to", "hf", "--max-shard-size", "1GB", *MEMORY]
SPLIT_EXPERTS = ["--dp", "2", "--ep", "2", "--experts", "split", "--memory", "3GiB", "--overwrite"]
KINDS = ("BF16", "F32", "F8_E4M3", "F4", "F6_E2M3")


def make_llama(place, gigabytes):
    """Write a Llama in bf16, in files of a GB."""
    generate.SHARD = 1_000_000_000
    return generate.generate(place, gigabytes)


def make_pt(place, gigabytes):
    """Write a Llama in bf16 as `torch.save` does, in one file."""
    place.mkdir(parents=True)
    config = generate.config(gigabytes)
    (place / "config.json").write_text(json.dumps(config))
    bf16 = BY_NAME["BF16"]
    shapes = {tensor.name: tensor.shape for tensor in describe_model(config).own()}
    sizes = [bf16.nbytes(shape) for shape in shapes.values()]
    value = {name: build_tensor_value(bf16, shape, number) for number, (name, shape) in enumerate(shapes.items())}
    item = build_archive(value, sizes)
    noise = np.random.default_rng(0).integers(0, 1 << 14, 1 << 23, dtype=np.uint16).tobytes()
    path = place / "pytorch_model.bin"
    training.place(path, item)
    with path.open("r+b") as file:
        for start, size in zip(item.starts, sizes, strict=True):
            file.seek(start)
            for at in range(0, size, len(noise)):
                file.write(noise[: size - at])


def make_matrices(place, kind, gigabytes):
    """Write matrices of 8,192 columns of one type, without a config."""
    place.mkdir(parents=True)
    dtype = BY_NAME[kind]
    rows = 4096
    count = max(1, round(gigabytes * 1e9 / dtype.nbytes((rows, 8192))))
    encoded = encode_header([(f"w{n}", dtype, (rows, 8192)) for n in range(count)], {"format": "pt"})
    noise = np.random.default_rng(0).integers(0, 256, 1 << 24, np.uint8)
    if kind in {"BF16", "F32"}:  # finite numbers, as weights are
        noise.view(np.uint16)[:] &= 0xBFFF
    elif kind.startswith("F8"):
        noise &= 0xBF
    with (place / "model.safetensors").open("wb") as file:
        file.write(encoded.header)
        left = encoded.size - len(encoded.header)
        while left:
            left -= file.write(noise[:left].data)


class BenchmarkRun:
    """Runs cases in turn, of one package or two, and gives each of their figures to `keep`."""

    def __init__(self, work, packages, keep, runs):
        self.work, self.packages, self.keep, self.runs = work, packages, keep, runs
        self.shown = {package: "this" if not number else "before" for number, package in enumerate(packages)}

    def convert(self, group, case, args, source, nbytes, *, cold=False, command=None, size=None):
        """Measure a conversion of `source`, the disk's speed just before it."""
        target = self.work / "out"
        places = {"{src}": str(source), "{dst}": str(target)}
        for _ in range(self.runs):
            for package in self.packages[:1] if command else self.packages:
                shutil.rmtree(target, ignore_errors=True)
                disk = measure_direct_write(self.work, nbytes)
                drop_files(source) if cold else training.warm(source)
                os.sync()
                try:
                    if command:
                        used = measure_program([places.get(part, part) for part in command])
                    else:
                        used = run_shardctl(["reshard", source, target, *args], package)
                except RuntimeError as error:
                    self.keep(group, case, self.shown[package], why=str(error))
                    continue
                size = size or sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
                shutil.rmtree(target)
                self.keep(group, case, self.shown[package], nbytes=size, disk=disk * size / nbytes, **used._asdict())

    def check(self, group, case, args, nbytes, accept=(0,), **more):
        """Measure a verb that writes nothing."""
        for _ in range(self.runs):
            for package in self.packages:
                try:
                    used = run_shardctl(args, package, accept)
                except RuntimeError as error:
                    self.keep(group, case, self.shown[package], why=str(error), **more)
                    continue
                self.keep(group, case, self.shown[package], nbytes=nbytes, **used._asdict(), **more)


def measure_reshard(run, gigabytes):
    """Row cuts, column cuts, one form of Hub files to another, warm and cold; and what people use beside it."""
    source = run.work / "hf"
    nbytes = make_llama(source, gigabytes)
    rules = run.work / "columns.toml"
    rules.write_text(COLUMNS)
    for name, args, cold in (
        ("tp 4, rows and columns", TP4, False),
        ("fsdp 4, rows", ["--fsdp", "4", *MEMORY], False),
        ("tp 4, columns alone", ["--rules", rules, *TP4], False),
        ("hf to hf, other files", ["--to", "hf", "--max-shard-size", "700MB", *MEMORY], False),
        ("tp 4, cold cache", TP4, True),
    ):
        run.convert("reshard", name, args, source, nbytes, cold=cold)
    run.convert("reshard", "`cp -r`", [], source, nbytes, command=["cp", "-r", "{src}", "{dst}"])
    loop = [sys.executable, "-c", reshard.SLICES, "{src}", "{dst}"]
    run.convert("reshard", "a slicing loop over safetensors, tp 4", [], source, nbytes, command=loop)
    for verb in (["digest"], ["verify", "--level", "full"]):
        training.warm(source)
        run.check("reshard", f"`{' '.join(verb)}`", [*verb, source], nbytes)
    shutil.rmtree(source)


def measure_sources(run, gigabytes):
    """The same bytes out of what trainers write."""
    for name, make in ((".pt", make_pt), ("DCP, 2 ranks", training.dcp), ("ZeRO-3, 2 ranks", training.zero3)):
        source = run.work / "trained"
        make(source, gigabytes)
        size = training.warm(source)
        run.convert("sources", f"{name} to hf", SMALL_SHARDS, source, size)
        run.convert("sources", f"{name} to hf, cold cache", SMALL_SHARDS, source, size, cold=True)
        shutil.rmtree(source)


def measure_growth(run, sizes):
    """`reshard --tp 4` as the checkpoint grows."""
    for gigabytes in sizes:
        source = run.work / "hf"
        free, needed = shutil.disk_usage(run.work).free / 1e9, 2.2 * gigabytes
        if free < needed:
            why = f"it needs {needed:.0f} GB of free space, and there are {free:.0f}"
            run.keep("growth", f"{gigabytes} GB", "this", why=why)
            continue
        nbytes = make_llama(source, gigabytes)
        run.convert("growth", f"{gigabytes} GB", TP4, source, nbytes)
        shutil.rmtree(source)


def measure_checking(run, gigabytes):
    """What digest and verify cost a GB of each type, and what their start-up costs."""
    for kind in KINDS:
        work, size = digest.band(kind, 4096)
        run.keep("kernel", kind, "this", nbytes=size, user=digest.seconds(work), system=0)
    for kind, size in (("start-up", 0), *((kind, gigabytes) for kind in KINDS)):
        source = run.work / "matrices"
        make_matrices(source, "BF16" if not size else kind, size or 0.001)
        nbytes = training.warm(source)
        for verb in (["digest"], ["verify", "--level", "full"]):
            run.check("checking", f"`{' '.join(verb)}`, {kind}", [*verb, source], nbytes, accept=(0, 3))
        shutil.rmtree(source)


def measure_effort(run):
    """Starting, planning and many small tensors, of `effort.py`."""
    root = run.work / "effort"
    for case, args in effort.make_sources(root).items():
        run.check("effort", case, args, 0, accept=(0, 3))
        shutil.rmtree(root / "out", ignore_errors=True)
    shutil.rmtree(root)


def measure_many(run, counts):
    """What a tensor costs besides its bytes, with DeepSeek-V3's names and small invented shapes."""
    run = BenchmarkRun(run.work, run.packages, run.keep, 1)
    for layers, experts in counts:
        source, target = run.work / "many", run.work / "out"
        config, generate.config = (
            generate.config,
            lambda _, n=layers, e=experts: (
                many.TINY
                | {
                    "num_hidden_layers": n,
                    "n_routed_experts": e,
                }
            ),
        )
        try:
            generate.generate(source)
        finally:
            generate.config = config
        index = json.loads(next(source.glob("*.index.json")).read_text()) if list(source.glob("*.index.json")) else {}
        tensors = len(index.get("weight_map", ())) or count_tensors(source / "model.safetensors")
        for verb, args in (
            ("plan", ["plan", source, "--dp", "2", "--ep", "2"]),
            ("digest", ["digest", source]),
            (
                "reshard",
                ["reshard", source, target, *SPLIT_EXPERTS],
            ),
        ):
            run.check("many", verb, args, 0, (0, 3), tensors=tensors)
            shutil.rmtree(target, ignore_errors=True)
        shutil.rmtree(source)


def count_tensors(path):
    """Count the tensors in the header of a file of safetensors."""
    with path.open("rb") as file:
        return len(json.loads(file.read(int.from_bytes(file.read(8), "little")))) - 1


def measure_loading(run, gigabytes):
    """`shardctl.load` beside other loaders."""
    found, without, nbytes = loading.measure_loaders(run.work / "load", gigabytes, run.runs)
    for name, rows in found.items():
        for seconds, processor, anonymous, _ in rows:
            label = f"{name} {loading.name_version(loading.LOADERS[name][0])}"
            run.keep("loading", label, "this", nbytes=nbytes, wall=seconds, user=processor, system=0, peak=anonymous)
    for name, why in without.items():
        run.keep("loading", name, "this", why=why)


def measure_timeline(run, gigabytes, picture):
    """What each thread of reshard does; draws the picture, and keeps the tables as they are."""
    script = Path(__file__).with_name("timeline.py")
    command = [sys.executable, script, run.work / "timeline", "--gigabytes", gigabytes, "--picture", picture]
    said = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    if said.returncode:
        raise RuntimeError(said.stderr.strip()[-300:])
    run.keep("timeline", "reshard", "this", text=said.stdout)
    shutil.rmtree(run.work / "timeline", ignore_errors=True)
