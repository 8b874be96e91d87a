"""Settings of optimizers: what a pickle may say, and the file that tells them where a layout has no place."""

from __future__ import annotations

import math
import time

import pytest

from shardctl.base.errors import SourceError
from shardctl.base.settings import as_setting, as_steps
from shardctl.tensors.manifest import ParameterGroup, TrainingState
from shardctl.tensors.training import encode_settings, parse_settings


@pytest.mark.parametrize("value", [None, True, 3, 0.1, "adamw", (), (0.9, 0.95), ((1, ("a", None)), False)])
def test_numbers_texts_and_lists_of_those_are_settings(value):
    assert as_setting(value) == (value,)


def test_lists_become_tuples_so_that_nobody_changes_them():
    assert as_setting([1, [2, (3, [])]]) == ((1, (2, (3, ()))),)


@pytest.mark.parametrize("value", [{}, [{}], object, b"", [1, [2, object]], 1j], ids=ascii)
def test_nothing_else_is_a_setting(value):
    assert as_setting(value) is None


@pytest.mark.parametrize(
    "value", ["\ud800", ["a", "b\udfff"], 1 << 63, -(1 << 63) - 1, 10**2000], ids=lambda v: ascii(v)[:20]
)
def test_what_could_not_be_written_again_is_no_setting(value):
    assert as_setting(value) is None


def test_lists_are_settings_up_to_four_in_one_another():
    assert as_setting([[[[1]]]]) == (((((1,),),),),)
    assert as_setting([[[[[1]]]]]) is None
    assert as_setting([[[[[]]]]]) is None


def test_a_list_without_end_is_none():
    endless: list[object] = []
    endless.append(endless)
    assert as_setting(endless) is None


@pytest.mark.parametrize("innermost", [0, []], ids=["numbers", "empty lists"])
def test_a_short_pickle_cannot_describe_more_values_than_anyone_waits_for(innermost):
    node: object = innermost
    for _ in range(3):
        node = [node] * 4_096
    started = time.process_time()
    assert as_setting(node) is None
    assert time.process_time() - started < 10


def test_the_names_of_all_parameters_of_a_large_model_are_a_setting():
    names = [f"model.layers.{n}.weight" for n in range(100_000)]
    assert as_setting(names) == (tuple(names),)


@pytest.mark.parametrize("value", [0, 7, 7.0, 1e15])
def test_steps_are_whole_numbers(value):
    assert as_steps(value) == int(value)


@pytest.mark.parametrize("value", [None, "7", True, -1, 0.5, math.inf, -math.inf, math.nan, 1e300, (7,)])
def test_nothing_else_is_a_number_of_steps(value):
    assert as_steps(value) is None


def test_settings_are_read_back_as_they_were():
    settings = {"lr": 1e-4, "betas": (0.9, 0.95), "fused": None, "name": "groß", "amsgrad": False}
    training = TrainingState(step=7, groups=(ParameterGroup(("a", "b"), settings), ParameterGroup((), {})))
    assert parse_settings(encode_settings(training)) == (7, training.groups)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"step": 1}',
        b'{"step": 1, "groups": [{"parameters": [], "settings": {"lr": {"to": 1}}}]}',
        b'{"step": 1, "groups": [{"parameters": [7], "settings": {}}]}',
        b'{"step": 1, "groups": [{"parameters": ["\\ud800"], "settings": {}}]}',
        b'{"step": 1, "groups": [{"parameters": [], "settings": {"\\udfff": 1}}]}',
    ],
    ids=["nothing", "a list", "no groups", "an object as setting", "a number as name", "no text", "no key"],
)
def test_a_malformed_file_of_settings_is_refused(data):
    with pytest.raises(SourceError, match=r"optimizer\.json (is malformed|is not JSON|holds half of a surrogate pair)"):
        parse_settings(data)
