"""No file of others can make kvlab run code: nothing in it unpickles, evaluates text or hands words to a shell.

Read from the syntax tree of the library, the tools and the notebooks' code cells, by the names that an import binds, so
that neither another name nor a comment decides. What is there for a reason stands in ALLOWED with the reason.
"""
import ast
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle", "code",
           "codeop", "telnetlib", "xml", "lxml"}
# what is called, by the full name that it is imported under
CALLS = {"eval", "exec", "compile", "__import__", "builtins.eval", "builtins.exec", "builtins.compile",
         "os.system", "os.popen", "os.execl", "os.spawnl", "subprocess.getoutput", "subprocess.getstatusoutput",
         "asyncio.create_subprocess_shell", "pty.spawn", "tempfile.mktemp", "torch.load", "torch.jit.load",
         "torch.package.PackageImporter", "pandas.read_pickle", "runpy.run_path", "runpy.run_module",
         "yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "yaml.unsafe_load_all", "timeit.timeit",
         "numpy.fromregex", "shutil.unpack_archive", "torch.hub.load", "ssl._create_unverified_context"}
METHODS = {"extractall", "read_pickle", "to_pickle", "exec_module", "load_module", "run_line_magic", "eval_js"}
# methods of pandas that run text as Python, unless the text is written there
TEXT = {"eval", "query"}
STARTS = {"subprocess.run", "subprocess.Popen", "subprocess.call", "subprocess.check_call", "subprocess.check_output"}
FLAGS = {("shell", True), ("allow_pickle", True), ("verify", False), ("trust_remote_code", True),
         ("weights_only", False), ("check_hostname", False), ("autoescape", False)}
NAMES = {"pd": "pandas", "np": "numpy"}                         # also where the import stands in another function

# (file, what was found): why it may be there
ALLOWED = {
    ("kvlab/registry.py", "exec_module"): "a user's own variant file, named on the command line, is imported",
    ("kvlab/attention/flex.py", "torch.compile"): "torch's compiler of its own function, no text",
}


def findings(source):
    """What is forbidden in a piece of Python, as names, in order of lines."""
    tree, names, found = ast.parse(source), dict(NAMES), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {(a.asname or a.name.split(".")[0]): a.name if a.asname else a.name.split(".")[0]
                      for a in node.names}
            found += [(node.lineno, a.name) for a in node.names if a.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {(a.asname or a.name): f"{node.module}.{a.name}" for a in node.names}
            found += [(node.lineno, node.module)] * (node.module.split(".")[0] in MODULES)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found += [(node.lineno, what) for what in called(node, names)]
        elif isinstance(node, ast.Attribute) and dotted(node, names) in CALLS - {"eval", "exec", "compile"}:
            found.append((node.lineno, dotted(node, names)))    # also handed on without being called
    return [what for _, what in sorted(set(found))]


def dotted(node, names):
    """The full name of what an expression names, as imported; "" where it is no plain name."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute) and (base := dotted(node.value, names)):
        return f"{base}.{node.attr}"
    return ""


def called(node, names):
    name = dotted(node.func, names)
    method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    if name in CALLS or method in METHODS:
        yield method if method in METHODS else name
    if method in TEXT and node.args and not isinstance(node.args[0], ast.Constant):
        yield f".{method}"
    if name == "yaml.load" and not any(dotted(word, names).endswith("SafeLoader")
                                       for word in (*node.args[1:], *(k.value for k in node.keywords))):
        yield "yaml.load"
    if name == "importlib.import_module" and node.args and isinstance(node.args[0], ast.Constant) \
            and str(node.args[0].value).split(".")[0] in MODULES:
        yield str(node.args[0].value)
    for keyword in node.keywords:
        for flag, value in FLAGS:
            harmless = isinstance(keyword.value, ast.Constant) and keyword.value.value is not value
            if keyword.arg == flag and not harmless:             # computed is not harmless
                yield f"{flag}={value}"
    if name in STARTS and not listed(node.args[0] if node.args else
                                     next((k.value for k in node.keywords if k.arg == "args"), None)):
        yield f"{name} of text"
    if method == "compile" and name == "torch.compile":
        yield name


def listed(node):
    """Whether what is started is given as separate words, and not as one text that a shell would read."""
    return not isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp) or (
        isinstance(node, ast.BinOp) and any(isinstance(side, ast.List | ast.Tuple | ast.Starred)
                                            for side in (node.left, node.right)))


def sources():
    """(file, Python source) of the library, the tools and the notebooks' code cells, magics left out."""
    for folder in ("kvlab", "tools"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
        lines = [line for cell in cells for line in "".join(cell["source"]).split("\n")]
        assert not [line for line in lines if line.lstrip().startswith("!")], f"{path.name} starts a shell"
        yield path.relative_to(ROOT).as_posix(), "\n".join(line for line in lines if not line.startswith("%"))


def test_nothing_in_kvlab_runs_what_a_file_says():
    everything = list(sources())
    assert len(everything) > 250 and sum(file.endswith(".ipynb") for file, _ in everything) > 10
    found = {(file, what) for file, source in everything for what in findings(source)}
    assert found - set(ALLOWED) == set(), "forbidden; if it must be, say why in ALLOWED"
    assert set(ALLOWED) - found == set(), "no longer there: take it out of ALLOWED"


@pytest.mark.parametrize("source, what", [
    ("import pickle", "pickle"), ("from pickle import loads", "pickle"), ("import cloudpickle as c", "cloudpickle"),
    ("def f():\n    import dill", "dill"), ("import joblib", "joblib"), ("import shelve", "shelve"),
    ("import marshal", "marshal"), ("import_module = 1\nimport importlib\nimportlib.import_module('pickle')", "pickle"),
    ("eval(x)", "eval"), ("exec(text)", "exec"), ("compile(text, 'a', 'exec')", "compile"),
    ("import builtins\nbuiltins.eval(x)", "builtins.eval"), ("__import__(name)", "__import__"),
    ("frame.eval(text)", ".eval"), ("frame.query(f'a > {b}')", ".query"),
    ("import torch\ntorch.load(p)", "torch.load"), ("from torch import load as l\nl(p)", "torch.load"),
    ("import torch\ntorch.load(p, weights_only=False)", "torch.load"), ("import torch as t\nf(t.load)", "torch.load"),
    ("import numpy as np\nnp.load(p, allow_pickle=True)", "allow_pickle=True"),
    ("import numpy as np\nnp.load(p, allow_pickle=flag)", "allow_pickle=True"),
    ("import pandas as pd\npd.read_pickle(p)", "read_pickle"), ("frame.to_pickle(p)", "to_pickle"),
    ("import yaml\nyaml.load(t)", "yaml.load"), ("import yaml\nyaml.load(t, Loader=yaml.Loader)", "yaml.load"),
    ("import yaml\nyaml.unsafe_load(t)", "yaml.unsafe_load"),
    ("import os\nos.system('x')", "os.system"), ("from os import popen\npopen('x')", "os.popen"),
    ("import subprocess\nsubprocess.run(['a'], shell=True)", "shell=True"),
    ("import subprocess\nsubprocess.run('ls -l')", "subprocess.run of text"),
    ("import subprocess as s\ns.Popen(f'ls {x}')", "subprocess.Popen of text"),
    ("import subprocess\nsubprocess.check_output(args='ls ' + x)", "subprocess.check_output of text"),
    ("import subprocess\nsubprocess.getoutput('ls')", "subprocess.getoutput"),
    ("import tempfile\ntempfile.mktemp()", "tempfile.mktemp"),
    ("import requests\nrequests.get(u, verify=False)", "verify=False"),
    ("import xml.etree.ElementTree as E", "xml.etree.ElementTree"), ("from xml.dom import minidom", "xml.dom"),
    ("from lxml import etree", "lxml"), ("import tarfile\ntarfile.open(p).extractall(q)", "extractall"),
    ("import zipfile\nwith zipfile.ZipFile(p) as z:\n    z.extractall()", "extractall"),
    ("import shutil\nshutil.unpack_archive(p)", "shutil.unpack_archive"),
    ("import runpy\nrunpy.run_path(p)", "runpy.run_path"),
    ("spec.loader.exec_module(m)", "exec_module"), ("load(m, trust_remote_code=True)", "trust_remote_code=True"),
])
def test_the_scanner_finds_each_forbidden_form(source, what):
    assert what in findings(source)


@pytest.mark.parametrize("source", [
    "import re\nre.compile(x)", "model.eval()", "frame.query('a > 1')", "'eval(x)'  # exec(x)",
    "import yaml\nyaml.load(t, Loader=yaml.SafeLoader)", "import yaml\nyaml.safe_load(t)",
    "import subprocess\nsubprocess.run(['ls', x], check=True)", "import subprocess\nsubprocess.run([*words, 'x'])",
    "import subprocess\nsubprocess.run(['a'] + words)", "import numpy as np\nnp.load(p, allow_pickle=False)",
    "import json\njson.load(f)", "self.load(x)", "import zipfile\nzipfile.ZipFile(p).read('a')"])
def test_the_scanner_leaves_what_is_harmless(source):
    assert findings(source) == []
