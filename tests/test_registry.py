"""A folder is a registry: files appear by being there, names lead to entries, wrong names get help."""
import importlib
import sys
import textwrap

import pytest

from kvlab.registry import Registry, load_file, no_such


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A package `shelf` on the import path; returns a function that adds a file to it."""
    package = tmp_path / "shelf"
    package.mkdir()
    monkeypatch.syspath_prepend(tmp_path)

    def add(name, text=""):
        (package / f"{name}.py").write_text(textwrap.dedent(text))
        importlib.invalidate_caches()

    add("__init__")
    yield add
    for name in [name for name in sys.modules if name.split(".")[0] == "shelf"]:
        del sys.modules[name]


def test_one_new_file_is_one_new_entry(folder):
    things = Registry("thing", "shelf", "name")
    assert things.names() == []
    folder("apple", """
        class Apple:
            name = "apple"
    """)
    folder("_base", "raise RuntimeError('never loaded: it starts with an underscore')")
    assert list(things) == ["apple"]
    assert things["apple"].__name__ == "Apple"


def test_names_are_listed_without_importing_the_entries(folder):
    folder("broken", "raise RuntimeError('loaded')")
    things = Registry("thing", "shelf")
    assert things.names() == ["broken"]
    with pytest.raises(RuntimeError, match="loaded"):
        things["broken"]


def test_without_an_attribute_the_module_is_the_entry(folder):
    folder("pear", "SIZE = 3")
    assert Registry("thing", "shelf")["pear"].SIZE == 3


def test_unknown_names_get_a_near_match_and_the_list(folder):
    folder("apple")
    folder("pear")
    with pytest.raises(KeyError) as caught:
        Registry("thing", "shelf")["aple"]
    assert caught.value.args[0] == "no thing named 'aple'. Did you mean 'apple'? Known: apple, pear"
    assert no_such("thing", "zzzzzz", ["pear", "apple"]).args[0] == "no thing named 'zzzzzz'. Known: apple, pear"


def test_a_part_of_a_name_is_near_enough_and_an_empty_list_says_so():
    known = ["meta-llama/Llama-4-Scout-17B-16E-Instruct", "Qwen/Qwen2-72B-Instruct"]
    assert "Did you mean 'meta-llama/Llama-4-Scout-17B-16E-Instruct'?" in no_such("model", "scout", known).args[0]
    assert "Did you mean" not in no_such("model", "", known).args[0]
    assert no_such("run", "ab12", []).args[0] == "no run named 'ab12'; there is none here yet"
    many = no_such("model", "thing1", [f"thing{i}" for i in range(40)]).args[0]
    assert many.endswith("All 40 names and aliases are listed by: kvlab ls models") and "Did you mean 'thing1'?" in many


@pytest.mark.parametrize("text, found", [
    ("class A:\n    name = 'other'", 0),
    ("class A:\n    name = 'plum'\nclass B:\n    name = 'plum'", 2),
    ("from collections import OrderedDict", 0),
])
def test_a_file_must_hold_exactly_one_class_of_its_name(folder, text, found):
    folder("plum", text)
    with pytest.raises(TypeError, match=f"exactly one class with name = 'plum', found {found}"):
        Registry("thing", "shelf", "name")["plum"]


def test_imported_classes_are_not_entries(folder):
    folder("apple", "class Apple:\n    name = 'apple'")
    folder("cider", "from shelf.apple import Apple\nclass Cider(Apple):\n    name = 'cider'")
    assert Registry("thing", "shelf", "name")["cider"].__name__ == "Cider"


def test_load_file_takes_a_dataclass_from_outside_the_package(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent("""
        from __future__ import annotations
        from dataclasses import dataclass

        @dataclass(frozen=True)
        class Mine:
            size: int = 4
    """))
    assert load_file(path).Mine().size == 4
    assert load_file(str(path)).Mine(size=5).size == 5


def test_load_file_says_what_to_give_when_there_is_no_file(tmp_path):
    with pytest.raises(KeyError, match="give the path of a .py file, then ':' and the class in it"):
        load_file(tmp_path / "none.py")
