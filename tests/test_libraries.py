"""A library counts as there only if it really imports, in another process that may be lost to it."""
import os
import sys
import threading
import time

import pytest

from kvlab import _child, libraries
from kvlab.libraries import LONGEST_REASON, Library, library


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Writes files of made-up packages into a folder on sys.path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    library.cache_clear()

    def write(path, text=""):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    yield write
    library.cache_clear()


def test_a_module_that_imports_is_there_with_its_version(fake):
    fake("made_lib/__init__.py", "__version__ = '1.2'\ndef run(): ...\n")
    assert library("made_lib", attributes=("run",)) == Library("made_lib", "1.2", None)
    assert "made_lib" not in sys.modules                          # it was loaded in the child only
    assert library("pytest", attributes=("raises",)).version == pytest.__version__


def test_an_absent_module_costs_no_process(fake, monkeypatch):
    monkeypatch.setattr(_child.subprocess, "Popen", lambda *a, **k: pytest.fail("a process was started"))
    for name in ("made_lib", "made_lib.part", "json.nothing", "sys.part"):
        assert library(name) == Library(name, None, f"{name} is not installed")


@pytest.mark.parametrize("name, there", [("made_lib", False), ("made_lib.cute", True), ("made_lib.other", False)])
def test_a_folder_that_another_package_left_is_not_a_library(fake, name, there):
    """flash-attn 4 installs flash_attn/cute beside no flash_attn/__init__.py, so `import flash_attn` succeeds."""
    fake("made_lib/cute/__init__.py", "flash_attn_func = print\n")
    fake("made_lib/other/readme.txt")
    assert (library(name).why_not is None) == there


def test_no_parent_is_run_in_this_process(fake):
    fake("made_lib/__init__.py", "import os; os._exit(3)")
    fake("made_lib/part.py")
    assert library("made_lib.part").why_not == "importing made_lib.part ended with exit code 3"


@pytest.mark.parametrize("text, reason", [
    ("import made_lib_cuda", "made_lib is installed but does not import: ModuleNotFoundError: No module named "
                             "'made_lib_cuda'"),
    ("raise ImportError('undefined symbol: _ZN3c10\\nsecond line')",
     "made_lib is installed but does not import: ImportError: undefined symbol: _ZN3c10 second line"),
    ("raise SystemExit(0)", "made_lib is installed but does not import: SystemExit: 0"),
    ("def f(:", "made_lib is installed but does not import: SyntaxError: invalid syntax (__init__.py, line 1)"),
    ("import os; os._exit(0)", "importing made_lib ended with exit code 0"),
    ("import os, sys; print('no kernel image', file=sys.stderr, flush=True); os._exit(7)",
     "importing made_lib ended with exit code 7: no kernel image"),
    ("__version__ = 3", "made_lib imports but has no run"),
])
def test_the_reason_is_one_sentence_of_the_child(fake, text, reason):
    fake("made_lib/__init__.py", text)
    assert library("made_lib", attributes=("run",)).why_not == reason


@pytest.mark.skipif(os.name == "nt", reason="Windows has no signals of this kind")
def test_a_crash_is_named_by_its_signal(fake):
    fake("made_lib.py", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert library("made_lib").why_not == "importing made_lib crashed (SIGSEGV)"


def test_what_a_library_prints_reaches_nobody_and_fools_nobody(fake, capfd):
    fake("made_lib.py", "print('{\"version\": \"9\"}')\nimport sys; print('warning', file=sys.stderr)")
    assert library("made_lib") == Library("made_lib", None, None)
    assert capfd.readouterr() == ("", "")


def test_one_that_hangs_is_given_up_and_ended(fake, tmp_path):
    pid = tmp_path / "pid"
    fake("made_lib.py", f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    assert library("made_lib", timeout_s=10).why_not == (
        "importing made_lib did not answer within 10 s: it hangs, or this machine is too busy")
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_a_long_reason_is_cut_and_names_no_home_folder(fake, monkeypatch, tmp_path):
    monkeypatch.setattr(libraries.Path, "home", lambda: tmp_path)
    fake("made_lib.py", f"raise OSError({str(tmp_path)!r} + '/lib.so: ' + 'x' * 5000)")
    why = library("made_lib").why_not
    assert len(why) == LONGEST_REASON and why.endswith("x…") and "OSError: ~/lib.so" in why


def test_each_is_tried_once_per_process(fake, tmp_path):
    fake("made_lib.py", f"open({str(tmp_path / 'count')!r}, 'a').write('x')")
    assert library("made_lib") is library("made_lib")
    assert (tmp_path / "count").read_text() == "x"


def test_several_are_tried_at_once_by_threads(fake):
    names = [f"made_{i}" for i in range(4)]
    for name in names:
        fake(f"{name}.py", "import time; time.sleep(1)")
    threads = [threading.Thread(target=library, args=(name,)) for name in names]
    begin = time.perf_counter()
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert all(library(name).why_not is None for name in names) and time.perf_counter() - begin < 60
