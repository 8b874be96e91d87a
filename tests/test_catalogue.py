"""What the catalogue says of libraries is complete and is all that the layers above know of them."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
from test_layers import LIBRARIES, MODULES, graph, library_of

from shardctl.base.errors import UsageError
from shardctl.conversion.conversion_plan import choose_layout
from shardctl.libraries.catalogue import FORMATS, LAYOUT_FILES, SCHEMA_FILES, get_schema, load_layouts
from shardctl.libraries.trtllm import writing as trtllm_writing
from shardctl.libraries.vllm import arrays as vllm_arrays
from shardctl.options import ReshardOptions
from shardctl.options.declaration import declared_options
from shardctl.options.reshard_options import LAYOUT_OPTIONS

FIXTURES = Path(__file__).parents[1] / "fixtures"
MACHINERY = {"arrays", "catalogue", "files", "reader", "registry", "schemas", "writer"}
CONTAINERS = {"shardctl.libraries.torch_save.zip_records", "shardctl.libraries.safetensors.header"}
"""How a damaged record of an archive is told, which is asked while files are copied and verified; and the header that
`verify` has the library safetensors read, too."""
DECLARED = re.compile(r"^(?:LAYOUT|SCHEMA): Final", re.MULTILINE)
BESIDE = {"consumers", "gguf", "peft"}
"""What is no format to convert from: a file that is only described, and adapters that are merged into a checkpoint."""


def test_no_name_stands_for_two():
    names = [each.name for each in FORMATS]
    assert len(set(names)) == len(names)


def test_every_layout_and_schema_that_is_declared_is_in_the_catalogue_by_its_own_name():
    assert [layout.name for layout in load_layouts()] == list(LAYOUT_FILES)
    assert [get_schema(name).name for name in SCHEMA_FILES] == list(SCHEMA_FILES)
    declared = [path.relative_to(LIBRARIES) for path in LIBRARIES.rglob("*.py") if DECLARED.search(path.read_text())]
    files = {".".join(path.with_suffix("").parts) for path in declared}
    assert files == {*LAYOUT_FILES.values(), *SCHEMA_FILES.values()}


def test_the_options_of_layouts_are_options_that_are_known_to_be_theirs():
    assert set(LAYOUT_OPTIONS) <= {field.name for field in fields(ReshardOptions)}
    assert set(LAYOUT_OPTIONS) == {option for layout in load_layouts() for option in layout.options}


def test_an_option_of_a_layout_has_the_choices_that_the_layout_knows():
    """Declared apart, because the program starts without loading the libraries."""
    options = {each.name: each for each in declared_options(ReshardOptions)}
    assert get_args(get_args(options["trtllm_embedding"].annotation)[0]) == tuple(
        trtllm_writing._EMBEDDING_PARTITION_DIMS
    )
    newest, middle, oldest = vllm_arrays.PROFILES
    said = f"writes: vLLM {newest}, {middle} or {oldest}, or {vllm_arrays.SGLANG}. Default: {newest}."
    assert said in options["vllm_profile"].option.help


def test_what_is_above_libraries_knows_none_of_them_but_by_the_catalogue():
    found = graph(MODULES)
    inside = graph(sorted(LIBRARIES.rglob("*.py")))
    strangers = [
        (own, other)
        for own, others in found.items()
        for other in others
        if own not in inside
        and other in inside
        and library_of(other) not in MACHINERY | BESIDE
        and other not in CONTAINERS
    ]
    assert strangers == []


def test_only_help_loads_the_libraries_before_a_command_runs():
    said = "import sys, shardctl.cli.app; print('shardctl.libraries.catalogue' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", said], text=True) == "False\n"


@pytest.mark.parametrize(
    ("args", "unneeded"),
    [
        (["--version"], ["shardctl.libraries.catalogue", "shardctl.models"]),
        (["--help"], ["shardctl.libraries.catalogue", "shardctl.models"]),
        (["finish", "--help"], ["shardctl.libraries.catalogue", "shardctl.models"]),
        (
            ["inspect", str(FIXTURES / "peft" / "hf" / "llama")],
            ["shardctl.models.derived", "shardctl.running.forward", "shardctl.models.families.gpt2"],
        ),
    ],
)
def test_a_command_loads_only_what_it_needs(args, unneeded):
    code = (
        "import sys; from shardctl.cli.program import run; code = run(sys.argv[2:]); "
        "sys.exit(f'{code} {set(sys.argv[1].split()) & set(sys.modules)}')"
    )
    command = [sys.executable, "-c", code, " ".join(unneeded), *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == "0 set()\n"


@pytest.mark.parametrize("option", [{"names": "keep"}, {"experts": "split"}, {"max_shard_size": 1}])
def test_an_option_that_a_layout_would_ignore_is_refused_with_the_layouts_that_have_it(option):
    with pytest.raises(UsageError, match="--to meta does not use") as raised:
        choose_layout(ReshardOptions(to="meta", **option))
    assert "hf" in str(raised.value.hint)
    assert "meta" not in str(raised.value.hint)
