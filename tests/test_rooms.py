"""Who may import whom: imports point downward only, and the rooms that need no torch never name it.

The imports are read from the source, function-level ones included, so that a rare path cannot hide one. What an
`import` statement is to Python, `import_module("…")` and a Registry over a package are here.
"""
import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvlab.shapes

PACKAGE = Path(kvlab.shapes.__file__).parent

BASE = {"shapes", "units", "registry", "libraries", "folders", "hushed", "lang", "_child"}
ATTENTION = BASE | {"kv", "kernels", "attention"}
PROBES = ATTENTION | {"catalog", "record", "probes"}
MODEL = ATTENTION | {"catalog", "model"}
ACCURACY = MODEL | {"record", "accuracy"}
BELOW_STUDIES = PROBES | ACCURACY | {"serving"}
# room or module -> what it may import (itself always); the longest name that matches counts
MAY_IMPORT = {
    "shapes": set(), "units": set(), "registry": set(), "folders": set(), "hushed": set(), "_child": set(),
    "libraries": {"_child"}, "lang": {"catalog"},
    "record": BASE, "record.sources": BASE | {"record", "catalog"}, "catalog": BASE, "kv": BASE, "kernels": BASE,
    "attention": ATTENTION, "probes": PROBES, "model": MODEL, "accuracy": ACCURACY,
    "serving": BASE | {"kv.block_pool", "kv.prefix", "kv.sizing", "catalog", "record"},
    "studies": BELOW_STUDIES, "claims": BELOW_STUDIES | {"studies"},
    "figures": BASE | {"record", "catalog", "kv.sizing"},
}
# what a person opens: may reach all
DOORS = {"__init__", "__main__", "api", "cli", "bench", "bench_inputs", "bench_kernels", "bench_models",
         "bench_serving", "bench_simulator", "listing",
         "report", "show", "doctor", "comparing", "lab", "widgets", "widgets_serving", "validate", "validate_answers",
         "validate_cases", "validate_job", "verbs", "show_serving", "show_claims", "claims_page", "widgets_gantt",
         "bench_store", "drill"}
TOPS = {"studies", "figures", "cli"}
NO_TORCH = BASE | {"record", "catalog", "kv.block_pool", "kv.prefix", "kv.sizing", "serving", "figures"}
LATE_TORCH = {"__init__", "__main__", "cli", "kv.formats"}      # inside functions only


def within(name, rooms):
    """The longest of the rooms that holds the dotted name, or None."""
    return max((room for room in rooms if name == room or name.startswith(room + ".")), key=len, default=None)


def imports(path, module, is_package):
    """(dotted target, at module level, for type checking only) of every import in a file, `kvlab.` and others alike."""
    def walk(node, top, typing):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, top, typing) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                start = module.split(".")[:None if is_package else -1] if child.level else []
                start = start[:len(start) - child.level + 1] if child.level else []
                base = ".".join(start + ([child.module] if child.module else []))
                yield from ((f"{base}.{alias.name}", top, typing) for alias in child.names)
            elif isinstance(child, ast.Call):
                called = child.func.attr if isinstance(child.func, ast.Attribute) else getattr(child.func, "id", "")
                if called in ("import_module", "__import__", "Registry"):
                    yield from ((a.value, top, typing) for a in child.args
                                if isinstance(a, ast.Constant) and isinstance(a.value, str))
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            typed = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from walk(child, top and not inside, typing or typed)
    yield from walk(ast.parse(path.read_text(encoding="utf-8")), True, False)


def violations(package):
    """One sentence for every import below `package` that breaks the rules."""
    found = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = "__init__" if parts == ("__init__",) else ".".join(parts[:-1] if is_package else parts)
        room = within(name, DOORS) or within(name, MAY_IMPORT)
        if room is None:
            found.append(f"{name} is in no room: add it to MAY_IMPORT")
            continue
        for target, top, typing in imports(path, "kvlab" + ("" if name == "__init__" else f".{name}"), is_package):
            if target.split(".")[0] == "kvlab":
                goal = target.removeprefix("kvlab").removeprefix(".")
                if room not in DOORS and within(goal, MAY_IMPORT[room] | {room}) is None:
                    found.append(f"{name} imports {target}")
                elif name == "__init__" and top and within(goal, TOPS):
                    found.append(f"{name} imports {target} outside a function")
            elif target.split(".")[0] == "torch" and not typing:
                if within(name, NO_TORCH):
                    found.append(f"{name} imports torch")
                elif top and within(name, LATE_TORCH):
                    found.append(f"{name} imports torch outside a function")
    return found


def test_imports_point_downward_and_torch_stays_where_it_belongs():
    assert violations(PACKAGE) == []


def test_every_torch_free_room_that_exists_loads_without_torch():
    """Also catches torch that arrives through somebody else's module."""
    names = [name for name in sorted(NO_TORCH | {"__init__", "cli", "kv.formats"})
             if (PACKAGE / (name.replace(".", "/") + ".py")).exists() or (PACKAGE / name.replace(".", "/")).is_dir()]
    modules = ["kvlab" if name == "__init__" else f"kvlab.{name}" for name in names]
    assert {"kvlab.shapes", "kvlab.kv.block_pool", "kvlab.kv.formats"} <= set(modules)
    script = f"""
import importlib, pkgutil, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError("torch is blocked in this test")
sys.meta_path.insert(0, Blocker())
for name in {modules}:
    module = importlib.import_module(name)
    if name not in ("kvlab", "kvlab.cli"):
        for part in pkgutil.walk_packages(getattr(module, "__path__", []), name + "."):
            importlib.import_module(part.name)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_import_kvlab_loads_neither_torch_nor_matplotlib():
    script = "import sys, kvlab; print([name for name in ('torch', 'matplotlib') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture
def house(tmp_path):
    """A small package that keeps the rules; returns a function that adds one file and lists what is broken then."""
    package = tmp_path / "kvlab"
    good = {
        "__init__": "def run():\n    from kvlab.studies import _run",
        "shapes": "import dataclasses", "registry": "", "cli": "from kvlab.studies import _run\nimport kvlab.figures",
        "kv/__init__": "", "kv/sizing": "from kvlab.kv.formats import kv_format\nfrom ..shapes import AttentionShape",
        "kv/formats/__init__": "def encode():\n    import torch",
        "kv/cache": "import torch\nfrom kvlab.kv import block_pool",
        "attention/__init__": "import torch\nfrom kvlab.registry import Registry\nRegistry('v', 'kvlab.attention')",
        "serving/__init__": "from kvlab.kv import sizing\nfrom kvlab.kv.block_pool import BlockPool",
        "record/__init__": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
        "figures/__init__": "from kvlab.kv import sizing\nfrom kvlab import record\nfrom . import _style",
        "studies/_run": "from kvlab.attention import x\nfrom . import memory_wall",
    }

    def add(name=None, text=""):
        for file, content in ({name: text} if name else good).items():
            path = package / f"{file}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return violations(package)

    assert add() == []
    return add


@pytest.mark.parametrize("name, text, sentence", [
    ("shapes", "import kvlab.units", "shapes imports kvlab.units"),
    ("registry", "from .shapes import Workload", "registry imports kvlab.shapes.Workload"),
    ("kv/late", "def f():\n    if 1:\n        import kvlab.attention", "kv.late imports kvlab.attention"),
    ("kv/typed", "if TYPE_CHECKING:\n    import kvlab.record", "kv.typed imports kvlab.record"),
    ("kv/root", "import kvlab", "kv.root imports kvlab"),
    ("kv/root", "from kvlab import run", "kv.root imports kvlab.run"),
    ("kv/sizing", "import torch", "kv.sizing imports torch"),
    ("kv/block_pool", "def f():\n    from torch.nn import functional", "kv.block_pool imports torch"),
    ("kv/formats/new", "import torch", "kv.formats.new imports torch outside a function"),
    ("kv/formats/__init__", "from torch import Tensor", "kv.formats imports torch outside a function"),
    ("serving/fast", "import torch as t", "serving.fast imports torch"),
    ("serving/fast", "from kvlab.kv import cache", "serving.fast imports kvlab.kv.cache"),
    ("serving/fast", "from kvlab.kv.formats import kv_format", "serving.fast imports kvlab.kv.formats.kv_format"),
    ("figures/wall", "from importlib import import_module\nimport_module('torch')", "figures.wall imports torch"),
    ("figures/wall", "from kvlab.studies import memory_wall", "figures.wall imports kvlab.studies.memory_wall"),
    ("record/late", "def f():\n    import torch", "record.late imports torch"),
    ("catalog/__init__", "from ..record import reading", "catalog imports kvlab.record.reading"),
    ("attention/up", "from ..probes import timer", "attention.up imports kvlab.probes.timer"),
    ("probes/timer", "from kvlab.model import x", "probes.timer imports kvlab.model.x"),
    ("studies/new", "from kvlab.figures import wall", "studies.new imports kvlab.figures.wall"),
    ("studies/new", "Registry('claim', 'kvlab.claims')", "studies.new imports kvlab.claims"),
    ("claims/new", "from kvlab.figures import make", "claims.new imports kvlab.figures.make"),
    ("model/new", "from kvlab import cli", "model.new imports kvlab.cli"),
    ("__init__", "from kvlab.studies import _run", "__init__ imports kvlab.studies._run outside a function"),
    ("__init__", "import torch", "__init__ imports torch outside a function"),
    ("cli", "import torch", "cli imports torch outside a function"),
    ("helpers", "", "helpers is in no room: add it to MAY_IMPORT"),
])
def test_the_checker_finds_an_injected_import(house, name, text, sentence):
    assert house(name, text) == [sentence]
