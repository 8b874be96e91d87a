"""Declares which levels of checks `verify` runs, and how it runs those that use devices."""

from pathlib import Path
from typing import Annotated, Final, Literal, TypeGuard, get_args

from shardctl.base.errors import UsageError
from shardctl.base.value import settings_class
from shardctl.options.declaration import CommandOption, HelpPanel, PathAccess
from shardctl.options.known_words import list_consumer_names, list_load_devices, parse_consumer
from shardctl.options.sizes import parse_size
from shardctl.options.sum_options import ADD_DIFFERENCE, AVERAGE_WEIGHTS, AVERAGE_WITH, EMA, SCALE
from shardctl.tensors.mesh import Mesh

LevelName = Literal["quick", "full", "load", "forward"]
_LEVEL_NAMES: Final = get_args(LevelName)
"""Each does what those before it do, and more."""


ENGINES: Final = ("vllm", "transformers", "fsdp2")
"""Those that `verify` starts itself."""


def is_running(engine: str | None) -> TypeGuard[str]:
    """Return whether an engine is named by the address at which it runs."""
    return engine is not None and engine.startswith(("http://", "https://"))


def parse_engine(text: str) -> str:
    """Refuse what is neither the name of an engine nor an address."""
    if text not in ENGINES and not is_running(text):
        raise UsageError(f"unknown --engine {text!r}", hint=f"use {', '.join(ENGINES)}, or http://HOST:PORT")
    from shardctl.storage.addresses import refuse_user_part

    refuse_user_part(text)
    return text


@settings_class
class VerifyOptions:
    """Which levels are run, and how `load` and `forward` are; some options imply one of these levels."""

    level: Annotated[
        LevelName,
        CommandOption(
            HelpPanel.GENERAL,
            "How far to check, from headers to running the model; full reads every element, load brings ranks onto "
            "their devices, and each includes those before it.",
            brief="How far to check: full, load, forward",
        ),
    ] = "quick"
    against: Annotated[
        str | Path | None,
        CommandOption(
            HelpPanel.GENERAL,
            "Compare every element with this checkpoint, which may have any layout.",
            brief="Compare every element with this checkpoint",
            metavar="SRC",
            accepts=str | None,
            access=PathAccess.READ,
        ),
    ] = None
    """Every copy of an element is compared, in whatever layouts the two are."""
    merge: Annotated[
        tuple[Path, ...],
        CommandOption(
            HelpPanel.GENERAL,
            "An adapter that was merged into the source; may be repeated.",
            metavar="DIR",
            accepts=list[Path],
            access=PathAccess.READ,
        ),
    ] = ()
    """Adapters of PEFT, in the order in which `reshard --merge` had them."""
    average_with: Annotated[tuple[str, ...], AVERAGE_WITH] = ()
    """Paths or addresses of further checkpoints of the same model."""
    average_weights: Annotated[str | None, AVERAGE_WEIGHTS] = None
    """Decimals or fractions that add up to 1; they are taken exactly."""
    ema: Annotated[str | None, EMA] = None
    add_difference: Annotated[tuple[str, str] | None, ADD_DIFFERENCE] = None
    scale: Annotated[str | None, SCALE] = None
    consumer: Annotated[
        str | None,
        CommandOption(
            HelpPanel.GENERAL,
            "Say from headers whether this program loads the directory: vllm, vllm@0.33, sglang, transformers, "
            "transformers@4.57, tgi or llama.cpp. Exits with 3 if it does not, or if that is not known.",
            brief="Check that this loads it: vllm, sglang, tgi",
            flag="--for",
            metavar="CONSUMER",
            parser=parse_consumer,
            words=list_consumer_names,
        ),
    ] = None
    mesh: Annotated[
        Mesh | None,
        CommandOption(
            HelpPanel.GENERAL,
            "Mesh whose ranks the files are, such as pp=2,tp=4, where no record says it; with --for, the mesh that the "
            "program runs on.",
            brief="Mesh of the files, where no record says it",
            metavar="AXES",
            parser=Mesh.parse,
        ),
    ] = None
    stages: Annotated[
        str | None,
        CommandOption(HelpPanel.GENERAL, "Layers per pipeline stage of --mesh. Default: balanced.", metavar="N,N,..."),
    ] = None
    attestation: Annotated[
        bool,
        CommandOption(
            HelpPanel.GENERAL,
            "First check every file against the signature in the directory, model.sig, which must be of --public-key "
            "or of --identity.",
            brief="Check the signature of every file",
        ),
    ] = False
    """If it does not hold, nothing else of the directory is read."""
    public_key: Annotated[
        Path | None,
        CommandOption(
            HelpPanel.GENERAL,
            "Public key (elliptic curve, PEM) whose signature --attestation trusts.",
            brief="Key whose signature is trusted",
            metavar="FILE",
            access=PathAccess.READ,
        ),
    ] = None
    identity: Annotated[
        str | None,
        CommandOption(
            HelpPanel.GENERAL,
            "Identity whose signature through Sigstore --attestation trusts, such as an e-mail address; needs "
            "--issuer.",
            metavar="NAME",
        ),
    ] = None
    issuer: Annotated[
        str | None,
        CommandOption(
            HelpPanel.GENERAL,
            "OpenID Connect issuer that vouches for --identity, such as https://accounts.google.com.",
            metavar="URL",
        ),
    ] = None
    policy: Annotated[
        Path | None,
        CommandOption(
            HelpPanel.GENERAL,
            "TOML file that says which code, pickles, types and licences are allowed, and whose signature is needed.",
            brief="File that says what is allowed",
            metavar="FILE",
            access=PathAccess.READ,
        ),
    ] = None
    """Each breach is a finding."""
    require_finite: Annotated[
        bool, CommandOption(HelpPanel.GENERAL, "Treat NaN and infinity as errors; implies --level full.")
    ] = False
    """Other warnings stay warnings."""
    require: Annotated[
        LevelName | None,
        CommandOption(
            HelpPanel.GENERAL,
            "Run this level, and exit with 3 only if it or one below it cannot be run. Default: all that are named.",
            brief="Level that must run; those above may be skipped",
        ),
    ] = None
    """Levels above it that lack what they need are skipped without making the result a failure."""
    device: Annotated[
        str | None,
        CommandOption(
            HelpPanel.TRIALS,
            "Load every rank onto this device: cpu, cuda, one such as cuda:1, or auto.",
            brief="Load the ranks onto cpu, cuda, cuda:1 or auto",
            flag="--load",
            metavar="DEVICE",
            words=list_load_devices,
        ),
    ] = None
    """`cuda` spreads ranks over all CUDA devices; `auto`, the default, also takes the CPU if there is none, or none has
    the memory."""
    device_memory: Annotated[
        int | None,
        CommandOption(
            HelpPanel.TRIALS, "Maximum device memory that a rank may use.", metavar="SIZE", parser=parse_size
        ),
    ] = None
    """Bytes."""
    device_map: Annotated[
        str | None,
        CommandOption(
            HelpPanel.TRIALS,
            "Where blocks of a checkpoint without ranks go: balanced over the devices, sequential, or as a JSON file "
            "of modules and devices says. Default: balanced.",
            metavar="MAP",
            words=lambda: ("balanced", "sequential"),
        ),
    ] = None
    """The file is a device map of transformers: `{"model.embed_tokens": 0, "model.layers.0": "cuda:1", "": "cpu"}`."""
    host_memory: Annotated[
        int | None,
        CommandOption(
            HelpPanel.TRIALS,
            "Maximum host memory for blocks that fit on no device. Default: half of what is free.",
            metavar="SIZE",
            parser=parse_size,
        ),
    ] = None
    """Bytes."""
    offload_folder: Annotated[
        Path | None,
        CommandOption(
            HelpPanel.TRIALS,
            "Directory for blocks that fit neither on devices nor in host memory; it is left empty.",
            metavar="DIR",
            access=PathAccess.WRITTEN,
        ),
    ] = None
    """Their file has no name there, so that the system frees it however the program ends."""
    forward: Annotated[
        bool,
        CommandOption(
            HelpPanel.TRIALS,
            "Run the model of SRC, and compare it with the source's; implies --level forward.",
            brief="Run the model, and compare it with the source's",
        ),
    ] = False
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"], CommandOption(HelpPanel.TRIALS, "Type that the model computes in.")
    ] = "fp32"
    prompt: Annotated[
        str | None,
        CommandOption(
            HelpPanel.TRIALS,
            "Text that the source and the shards continue; implies --level forward.",
            metavar="TEXT",
        ),
    ] = None
    tokens: Annotated[
        int, CommandOption(HelpPanel.TRIALS, "Number of tokens to generate after --prompt.", metavar="N", least=1)
    ] = 16
    processes: Annotated[
        int | None,
        CommandOption(
            HelpPanel.TRIALS,
            "Maximum number of processes, one per rank; with --engine, how many share a model that is not cut.",
            metavar="N",
            least=1,
        ),
    ] = None
    """None chooses by the size of the model; 0 runs all ranks in this process."""
    virtual: Annotated[bool, CommandOption(HelpPanel.TRIALS, "Run all ranks in one process.")] = False
    second_opinion: Annotated[
        bool, CommandOption(HelpPanel.TRIALS, "Compare with transformers' own tensor parallelism, too.")
    ] = False

    seq_len: Annotated[
        int | None,
        CommandOption(
            HelpPanel.TRIALS,
            "Tokens in each sequence that the model is run with, and in each window of --text. Default: 32, and 256.",
            metavar="N",
            least=2,
        ),
    ] = None
    """Longer ones reach the end of sliding windows, and positions that rotary embeddings scale."""
    decode: Annotated[
        int | None,
        CommandOption(
            HelpPanel.TRIALS,
            "Also decode the last N tokens of each sequence one by one with a KV cache; implies --level forward.",
            metavar="N",
            least=1,
        ),
    ] = None
    text: Annotated[
        Path | None,
        CommandOption(
            HelpPanel.TRIALS,
            "Measure the perplexity of this text with the tokenizer of the checkpoint; implies --level forward.",
            brief="Measure the perplexity of this text",
            metavar="FILE",
            access=PathAccess.READ,
        ),
    ] = None
    write_golden: Annotated[
        Path | None,
        CommandOption(
            HelpPanel.TRIALS,
            "Write what the model computes to a new file, which --golden reads; implies --level forward.",
            brief="Write the model's output, for --golden",
            metavar="FILE",
            access=PathAccess.WRITTEN,
        ),
    ] = None
    golden: Annotated[
        Path | None,
        CommandOption(
            HelpPanel.TRIALS,
            "Compare what the model computes, and the digest, with this file of --write-golden; needs no source.",
            brief="Compare the output with a file of --write-golden",
            metavar="FILE",
            access=PathAccess.READ,
        ),
    ] = None
    """It has the inputs, and the type in which the model computes."""
    engine: Annotated[
        str | None,
        CommandOption(
            HelpPanel.TRIALS,
            "Have vllm, transformers or fsdp2 load the directory, and compare what it says with the source; or ask a "
            "running vLLM at http://HOST:PORT which weights it holds.",
            brief="Have vllm, transformers or fsdp2 load it",
            metavar="ENGINE",
            parser=parse_engine,
            words=lambda: ENGINES,
        ),
    ] = None
    engine_python: Annotated[
        Path | None,
        CommandOption(
            HelpPanel.TRIALS,
            "Python that has the engine. Default: this one.",
            metavar="PATH",
            access=PathAccess.READ,
        ),
    ] = None
    engine_timeout: Annotated[
        int, CommandOption(HelpPanel.TRIALS, "Seconds that the engine may take.", metavar="SECONDS", least=1)
    ] = 3600

    def require_used(self) -> None:
        """Raise UsageError for an option of a level that is not run: whoever gave it takes that level for passed."""
        level, usual = _LEVEL_NAMES.index(self.highest_level()), VerifyOptions()
        loads, runs = level >= _LEVEL_NAMES.index("load"), level >= _LEVEL_NAMES.index("forward")
        started = self.engine is not None and not is_running(self.engine)
        self._require_trust()
        for name, used, needed in (
            ("device_memory", loads, "--load DEVICE"),
            ("device_map", loads, "--load DEVICE"),
            ("host_memory", loads, "--load DEVICE"),
            ("offload_folder", loads, "--load DEVICE"),
            ("dtype", runs or started, "--forward or --engine"),
            ("tokens", self.prompt is not None, "--prompt TEXT"),
            ("processes", runs or started, "--forward or --engine"),
            ("virtual", runs, "--forward"),
            ("seq_len", runs, "--forward"),
            ("engine_python", started, "--engine"),
            ("engine_timeout", self.engine is not None, "--engine"),
        ):
            if not used and getattr(self, name) != getattr(usual, name):
                raise UsageError(f"--{name.replace('_', '-')} has an effect only with {needed}", hint=f"add {needed}")
        if self.golden is not None and self.seq_len is not None and self.text is None:
            raise UsageError(
                "--seq-len has no effect with --golden, whose file has the inputs",
                hint="leave --seq-len out, or give it with --write-golden",
            )

    def _require_trust(self) -> None:
        """Raise UsageError if a signature is to be checked and nobody is trusted, or the reverse.

        A policy may name whom to trust.
        """
        named = [name for name in ("public_key", "identity", "issuer") if getattr(self, name) is not None]
        if named and not self.attestation:
            flag = f"--{named[0].replace('_', '-')}"
            raise UsageError(f"{flag} has an effect only with --attestation", hint="add --attestation")
        if self.attestation and not named and self.policy is None:
            raise UsageError(
                "--attestation does not say whom to trust",
                hint="add --public-key FILE, or --identity NAME and --issuer URL",
            )
        if named and named not in (["public_key"], ["identity", "issuer"]):
            raise UsageError(
                "a signature is of one key or of one identity",
                hint="give --public-key FILE, or --identity NAME and --issuer URL",
            )

    @property
    def writes_or_reads_golden(self) -> bool:
        """Whether there is a file of golden outputs."""
        return self.write_golden is not None or self.golden is not None

    def highest_level(self) -> LevelName:
        """Find the highest of the levels that are asked for or implied; raises UsageError for an unknown name."""
        asked: list[LevelName] = [self.level, self.require or self.level]
        for level in asked:
            if level not in _LEVEL_NAMES:
                raise UsageError(f"unknown level {level!r}", hint=f"the levels are {', '.join(_LEVEL_NAMES)}")
        if self.require_finite:
            asked.append("full")
        if self.device is not None:
            asked.append("load")
        runs = self.forward or self.second_opinion or self.decode or self.writes_or_reads_golden
        if runs or self.prompt is not None or self.text is not None:
            asked.append("forward")
        return max(asked, key=_LEVEL_NAMES.index)
