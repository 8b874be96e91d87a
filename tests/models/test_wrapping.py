"""Names below a trainer's modules are read as those of the class: by the reading that gives it all of its tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
from model_oracle import FIXTURES, fixture, on_meta, state, stored

from shardctl.base.errors import SourceError
from shardctl.models import describe_model
from shardctl.models.names.meta_names import find_meta_name
from shardctl.models.names.naming import bind_manifest
from shardctl.models.names.wrapping import AmbiguousNamesError, find_reading
from shardctl.tensors.manifest import TrainingState
from shardctl.tensors.training import format_state_name

PREFIXES = ("model.", "model.model.", "_forward_module.net.", "module.policy._orig_mod.")


def bind(model, shapes):
    return bind_manifest(model, stored(shapes.items()))


def layout(manifest):
    """What a tensor is called, and what it is called in files, in the class's names."""
    return [(t.name, t.shape, t.ties, t.spelling) for t in manifest.tensors.values()]


def wrap(shapes, prefix):
    return {f"{prefix}{name}": shape for name, shape in shapes.items()}


def move(manifest, places):
    """The same with each tensor at an offset of its own."""
    tensors = {}
    for name, tensor in manifest.tensors.items():
        (chunk,) = tensor.chunks
        where = replace(chunk.where, offset=places[name])
        tensors[name] = replace(tensor, chunks=(replace(chunk, where=where),))
    return replace(manifest, tensors=tensors)


@pytest.mark.parametrize("name", FIXTURES)
def test_a_wrapped_model_has_the_names_of_its_class(name):
    """Of every family, by the names of its state dict in transformers, and by those of the Hub."""
    model = describe_model(fixture(name))
    for shapes in (model.state(), {tensor.name: tensor.shape for tensor in model.own()}):
        expected = layout(bind(model, shapes))
        for prefix in PREFIXES:
            assert layout(bind(model, wrap(shapes, prefix))) == expected, prefix


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "qwen3_moe", "qwen3_vl"])
def test_names_of_transformers_own_class_are_found_below_a_module_with_the_base_models_name(name):
    """The prefix of the base model twice: transformers 4 loads nothing under such names."""
    config = fixture(name)
    model, shapes = describe_model(config), state(on_meta(config))
    assert layout(bind(model, wrap(shapes, f"{model.prefix}."))) == layout(bind(model, shapes))


@pytest.mark.parametrize("prefix", ["", "encoder.", "module.net."])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_base_model_lacks_the_head_of_the_configs_class_and_a_warning_names_what_is_new(name, prefix):
    model = describe_model(fixture(name))
    base = f"{model.prefix}."
    shapes = {t.name.removeprefix(base): t.shape for t in model.own() if t.name.startswith(base)}
    bound = bind(model, wrap(shapes, prefix))
    assert {f"{base}{each}" for each in shapes} == bound.tensors.keys()
    (warning,) = bound.warnings
    head = next(t.name for t in model.own() if not t.name.startswith(base))
    assert warning.startswith(f"the names are those of a base model: a loader makes {head}")


def test_a_head_that_is_lost_from_a_whole_model_is_missed():
    model = describe_model(fixture("llama"))
    shapes = {t.name: t.shape for t in model.own() if t.name != "lm_head.weight"}
    for prefix in ("", "module."):
        with pytest.raises(SourceError, match=r"lacks 1 tensor of LlamaForCausalLM: lm_head\.weight"):
            bind(model, wrap(shapes, prefix))


@pytest.mark.parametrize("around", ["", "net."])
def test_a_head_beside_the_module_of_its_base_model_is_the_classs(around):
    model = describe_model(fixture("llama"))
    shapes = {f"{around}{t.name.replace('model.', 'backbone.', 1)}": t.shape for t in model.own()}
    assert f"{around}backbone.norm.weight" in shapes
    bound = bind(model, shapes)
    assert list(bound.tensors) == [t.name for t in model.own()]
    assert bound.tensors["lm_head.weight"].chunks[0].name == f"{around}lm_head.weight"


def test_two_models_are_not_guessed_between():
    model = describe_model(fixture("llama"))
    shapes = {t.name: t.shape for t in model.own()}
    both = wrap(shapes, "student.") | wrap(shapes, "teacher.")
    with pytest.raises(AmbiguousNamesError, match=r"below 'student\.' and those below 'teacher\.' are both a whole"):
        bind_manifest(model, move(stored(both.items()), {name: number for number, name in enumerate(both)}))


def test_two_names_of_the_same_bytes_are_one_model():
    """A module and its compiled form share their storage."""
    model = describe_model(fixture("llama"))
    shapes = {t.name: t.shape for t in model.own()}
    both = wrap(shapes, "model.") | wrap(shapes, "compiled._orig_mod.")
    places = {name: number % len(shapes) for number, name in enumerate(both)}
    reading = find_reading(model, move(stored(both.items()), places))
    assert reading is not None
    assert reading.prefix == "model."


def test_optimizer_states_follow_their_parameters_though_they_have_other_wrappers():
    model = describe_model(fixture("llama"))
    shapes = {t.name: t.shape for t in model.own()}
    weights = stored(wrap(shapes, "model._orig_mod.").items())
    moments = stored((format_state_name("exp_avg", f"model.{name}"), shape) for name, shape in shapes.items())
    bound = bind_manifest(model, replace(weights, training=TrainingState(states=moments.tensors)))
    assert list(bound.training.states) == [format_state_name("exp_avg", name) for name in bound.tensors]


def test_metas_names_are_found_in_the_wrapper_of_a_compiled_model():
    model = describe_model(fixture("llama"))
    shapes = {t.name: t.shape for t in model.own()}
    theirs = {f"_orig_mod.{find_meta_name(name)}": shape for name, shape in shapes.items()}
    assert list(bind(model, theirs).tensors) == list(shapes)
