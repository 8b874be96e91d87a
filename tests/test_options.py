"""What options ask for where several are read together, and how their declarations are taken apart."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest

from shardctl.base.errors import UsageError
from shardctl.options import (
    DestinationOptions,
    InspectOptions,
    PlanOptions,
    ReshardOptions,
    SourceOptions,
    VerifyOptions,
)
from shardctl.options.declaration import (
    declared_options,
    effort_options,
    flat_options,
    permission_options,
    withdraw_permissions,
)

KINDS = (DestinationOptions, InspectOptions, PlanOptions, ReshardOptions, SourceOptions, VerifyOptions)


@pytest.mark.parametrize(
    ("options", "level"),
    [
        (VerifyOptions(), "quick"),
        (VerifyOptions(device="cpu"), "load"),
        (VerifyOptions(forward=True), "forward"),
        (VerifyOptions(device="cpu", prompt=""), "forward"),
        (VerifyOptions(second_opinion=True), "forward"),
        (VerifyOptions(level="full"), "full"),
        (VerifyOptions(level="full", device="cpu"), "load"),
        (VerifyOptions(level="load", require="full"), "load"),
        (VerifyOptions(require="forward", device="cpu"), "forward"),
    ],
    ids=str,
)
def test_some_options_of_verify_ask_for_a_level(options, level):
    assert options.highest_level() == level


@pytest.mark.parametrize("options", [VerifyOptions(level="deep"), VerifyOptions(forward=True, require="deep")])  # type: ignore[arg-type]
def test_a_level_that_there_is_not_is_refused(options):
    with pytest.raises(UsageError, match="unknown level 'deep'") as raised:
        options.highest_level()
    assert raised.value.hint == "the levels are quick, full, load, forward"


@pytest.mark.parametrize(
    ("dtype", "cast", "quantised"), [("keep", None, None), ("bf16", "bf16", None), ("int4", None, "int4")]
)
def test_a_type_of_plan_is_a_cast_or_a_question(dtype, cast, quantised):
    options = PlanOptions(dtype=dtype)
    assert (options.cast_type, options.quantized_type) == (cast, quantised)


def test_what_a_plan_file_leaves_open_shapes_no_byte():
    assert effort_options(ReshardOptions) == ("allow_partial_adapter", "allow_expansion", "host_memory", "threads")
    assert "strict" in effort_options(SourceOptions)


@pytest.mark.parametrize("kind", [ReshardOptions, SourceOptions])
def test_a_permission_is_given_to_the_run_and_beside_a_plan(kind):
    permissions = permission_options(kind)
    assert set(permissions) <= set(effort_options(kind)), "shapes_result=False: no plan file decides it"
    assert all(
        getattr(withdraw_permissions(kind(**dict.fromkeys(permissions, True))), name) is False for name in permissions
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_flag_is_declared_once(kind):
    flags = [declared.flag for declared, _ in flat_options(kind)]
    assert len(set(flags)) == len(flags)
    assert all(option.help.strip() for _, option in flat_options(kind))


def test_what_the_verb_sets_itself_is_no_option():
    named = {declared.name for declared in declared_options(SourceOptions)}
    assert {field.name for field in fields(SourceOptions)} - named == {"unbound", "unpadded", "untied", "described"}


@pytest.mark.parametrize("kind", KINDS)
def test_options_are_given_by_name_and_stay(kind):
    with pytest.raises(TypeError):
        kind(None)
    with pytest.raises(FrozenInstanceError):
        setattr(kind(), fields(kind)[0].name, None)
