"""Docstrings of what users import: a first sentence, parameters that exist, shapes of arrays, sources of formulas."""
import dataclasses
import importlib
import inspect
import pkgutil
import re
import sys
from functools import cache

import pytest

import kvlab

MODULES = (
    "kvlab.shapes kvlab.units kvlab.api kvlab.comparing kvlab.claims kvlab.claims_page kvlab.figures kvlab.attention "
    "kvlab.probes kvlab.kv.sizing kvlab.kv.formats kvlab.kv.block_pool kvlab.kv.prefix kvlab.kv.cache kvlab.widgets "
    "kvlab.widgets_gantt kvlab.widgets_serving kvlab.serving.capacity kvlab.serving.simulator kvlab.serving.scheduler "
    "kvlab.serving.traces kvlab.serving.workloads kvlab.serving.replay kvlab.serving.metrics kvlab.serving.alerts "
    "kvlab.serving.lint kvlab.model.load kvlab.model.generate kvlab.model.transformers kvlab.model.capture").split()
ROOMS = ("kvlab.catalog", "kvlab.accuracy", "kvlab.record")           # with all their modules
FORMULAS = ("kvlab.kv.sizing", "kvlab.accuracy.statistics", "kvlab.record.statistics", "kvlab.serving.capacity")
ARRAY = re.compile(r"\b(Tensor|ndarray)\b")
SHAPE = re.compile(r"_[A-Z0-9]+$")                                    # k_SKD, ids_BT: an axis a letter


def modules():
    for room in ROOMS:
        yield room
        yield from (f"{room}.{one.name}" for one in pkgutil.iter_modules(importlib.import_module(room).__path__)
                    if not one.name.startswith("_"))
    yield from MODULES


def function(thing):
    """The function behind a function, method or property; None for anything else."""
    thing = thing.fget if isinstance(thing, property) else getattr(thing, "func", thing)
    thing = inspect.unwrap(getattr(thing, "__func__", thing))
    return thing if inspect.isfunction(thing) else None


@cache
def public():
    """name -> class or function that is public, and the methods of the classes."""
    found = {}
    for name in modules():
        module = importlib.import_module(name)
        names = getattr(module, "__all__", None) or [key for key, value in vars(module).items() if not key.startswith(
            "_") and getattr(value, "__module__", "") == name]
        for thing in (inspect.unwrap(getattr(module, key)) for key in names):
            if getattr(thing, "__module__", "").startswith("kvlab") and (inspect.isclass(thing) or function(thing)):
                found[f"{thing.__module__}.{thing.__qualname__}"] = thing
                if inspect.isclass(thing):
                    methods = {key: function(value) for key, value in vars(thing).items() if not key.startswith("_")}
                    found |= {f"{thing.__module__}.{thing.__qualname__}.{key}": one for key, one in methods.items()
                              if one}
    return found


def doc(thing):
    """The docstring that somebody wrote: a dataclass without one gets its signature."""
    text = inspect.cleandoc(thing.__doc__ or "")
    return "" if inspect.isclass(thing) and text.startswith(f"{thing.__name__}(") else text


def failing(wrong):
    return {name: found for name, thing in public().items() if (found := wrong(name, thing))}


def test_what_is_walked_is_the_api_and_what_the_documents_name():
    assert len(public()) > 350
    things = set(public().values())
    assert [name for name in kvlab.__all__[1:] if inspect.unwrap(getattr(kvlab, name)) not in things] == []


def test_the_first_line_is_one_sentence_of_at_most_120_characters():
    def wrong(name, thing):
        first = doc(thing).split("\n")[0]
        if not first:                               # the name of a property or of a method without arguments may do
            return (inspect.isclass(thing) or "." not in thing.__qualname__
                    or len(inspect.signature(thing).parameters) > 1)
        return len(first) > 120 or not first.endswith((".", "?")) or re.search(r"[.?!] [A-Z]", first)
    assert failing(wrong) == {}


def documented(text):
    """Names explained behind the first line: "name: …" or "name, name: …" where a sentence or a paragraph begins."""
    name, rest = r"[a-z][a-z0-9_]*", text.partition("\n")[2]
    for names in re.findall(rf"(?:^|(?<=[.;)] ))((?:{name}, )*{name}): ", rest, re.MULTILINE):
        yield from (one for one in names.split(", ") if one != "default")


def test_what_a_docstring_explains_is_in_the_code():
    """A parameter, a field, or at least a word of the module's code: a name that was changed is neither."""
    @cache
    def words(module):
        source = inspect.getsource(sys.modules[module])
        return set(re.findall(r"\w+", re.sub(r'""".*?"""', "", source, flags=re.DOTALL)))

    def wrong(name, thing):
        known = set(dir(thing)) if inspect.isclass(thing) else set(inspect.signature(thing).parameters)
        return [one for one in documented(doc(thing)) if one not in known | words(thing.__module__)]
    assert list(documented("a: b.\n\nkv_len: c. n, q_len: d, at x: y; default: z.")) == ["kv_len", "n", "q_len"]
    assert failing(wrong) == {}


def test_parameters_that_are_arrays_have_their_shape_said():
    def wrong(name, thing):
        text, taken = doc(thing), [] if inspect.isclass(thing) else inspect.signature(thing).parameters.values()
        return [one.name for one in taken if ARRAY.search(str(one.annotation)) and not SHAPE.search(one.name)
                and not re.search(r"\[.+\]", text)]
    assert failing(wrong) == {}


def test_formulas_have_a_source_and_units():
    def wrong(name, thing):
        text = doc(thing)
        formula = inspect.isfunction(thing) and name.rpartition(".")[0] in FORMULAS
        unit = r"bytes|tokens|share|requests|interval|\bn\b|needs|exponent|medians|tests? "
        return formula and ("Source:" not in text or not re.search(unit, text))
    assert failing(wrong) == {}
    assert sum(name.rpartition(".")[0] in FORMULAS for name in public()) > 20


def test_every_variant_says_where_its_algorithm_or_its_cost_is_from():
    from kvlab.attention import variants
    assert [name for name in variants if "Source:" not in doc(variants[name]) + doc(variants[name].cost)] == []


@pytest.mark.parametrize("cls", ["kvlab.shapes.ModelSpec", "kvlab.catalog.gpus.GPUSpec",
                                 "kvlab.catalog.gpus.FormatSupport", "kvlab.catalog.engines.Cell"])
def test_what_the_catalogue_gives_carries_its_source(cls):
    module, _, name = cls.rpartition(".")
    fields = {one.name for one in dataclasses.fields(getattr(importlib.import_module(module), name))}
    assert "source" in fields
