"""The API of record: which names `kvlab` has, that each is loaded when first used, and says what it does."""
import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import kvlab

NAMES = {
    "__version__", "AttentionShape", "Layout", "Workload", "attach", "capture", "compare", "export", "figure",
    "findings", "gpu", "kv_format", "ledger", "load_decoder", "measure", "model_spec", "query", "read_table",
    "reference", "run", "score", "size", "table", "trial", "wide"}


def test_the_names_are_these_and_no_others():
    assert len(kvlab.__all__) == len(NAMES) and set(kvlab.__all__) == NAMES
    assert dir(kvlab) == sorted(NAMES)


@pytest.mark.parametrize("name", sorted(NAMES - {"__version__"}))
def test_each_name_is_there_and_says_what_it_does(name):
    thing = getattr(kvlab, name)
    assert callable(thing) and inspect.getdoc(thing), name
    assert thing.__module__.startswith("kvlab.")


def test_a_name_that_is_not_there_is_answered_with_those_that_are():
    with pytest.raises(AttributeError, match="no attribute 'measur'; it has .*measure"):
        kvlab.measur  # noqa: B018


def test_importing_kvlab_loads_nothing_but_kvlab_itself():
    said = subprocess.run([sys.executable, "-c", "import sys, kvlab; dir(kvlab); print(*sys.modules)"],
                          capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in said if name.startswith("kvlab")] == ["kvlab"]
    assert not {"torch", "numpy", "pandas", "matplotlib", "typer"} & set(said)


def test_type_checkers_see_the_names_that_are_loaded_when_used():
    tree = ast.parse(Path(kvlab.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.asname: one.module for one in block.body if isinstance(one, ast.ImportFrom) for alias in one.names
            if alias.asname}
    renamed = {one.targets[0].id: f"kvlab.catalog.{ast.unparse(one.value).replace('.', ':')}" for one in block.body
               if isinstance(one, ast.Assign)}
    assert seen | renamed == kvlab._LAZY


def test_the_package_says_that_it_has_types():
    assert Path(kvlab.__file__).with_name("py.typed").read_bytes() == b""
