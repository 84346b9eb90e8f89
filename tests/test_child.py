"""Programs that crash, hang, leave others behind or print without end are told in words and left nowhere."""
import os
import sys
import time

import pytest

from kvlab._child import LARGEST_OUTPUT, python, run

posix = pytest.mark.skipif(os.name != "posix", reason="signals and process groups")


@pytest.mark.parametrize("code, how", [
    ("print('well')", ""), ("raise SystemExit(3)", "ended with exit code 3"),
    ("import sys; print('one\\ntwo', file=sys.stderr); sys.exit(9)", "ended with exit code 9: two"),
    ("print('only here'); raise SystemExit(1)", "ended with exit code 1: only here"),
    pytest.param("import os; os.abort()", "crashed (SIGABRT)", marks=posix)])
def test_how_a_program_ended(code, how):
    ended = run([sys.executable, "-c", code], timeout_s=60)
    assert ended.how == how and ended.stdout == ("well\n" if not how else ended.stdout)


@posix
@pytest.mark.parametrize("timeout_s, words", [(0.4, "0.4 s"), (1.1, "1 s")])
def test_one_that_hangs_is_ended_with_what_it_started(tmp_path, timeout_s, words):
    pid = tmp_path / "pid"
    code = f"sleep 600 & echo $! > {pid}; wait"
    assert run(["/bin/sh", "-c", code], timeout_s=timeout_s).how == f"did not answer within {words}"
    until = time.monotonic() + 20
    while time.monotonic() < until:                     # whoever adopts it may take a moment to bury it
        try:
            with open(f"/proc/{int(pid.read_text())}/stat") as stat:
                if stat.read().split()[2] == "Z":
                    return
        except OSError:
            return
        time.sleep(0.05)
    pytest.fail("the grandchild lives")


@posix
def test_a_descendant_that_left_the_group_keeps_nobody_waiting():
    """It holds the output open; a pipe would not end before it does."""
    code = "import os, time\nif os.fork() == 0: os.setsid(); time.sleep(30)\nelse: print('done')"
    began = time.monotonic()
    assert run([sys.executable, "-c", code], timeout_s=25).stdout == "done\n" and time.monotonic() - began < 20


def test_output_without_end_is_cut():
    ended = run([sys.executable, "-c", f"print('x' * {3 * LARGEST_OUTPUT})"], timeout_s=60)
    assert len(ended.stdout) == LARGEST_OUTPUT and ended.stdout.endswith("x\n")


def test_answers_before_a_crash_count_and_prints_are_no_answers():
    code = "print('{\"a\": 9}'); answer(a=1); answer(b='µ'); print('why', file=sys.stderr); os._exit(5)"
    assert python(code, timeout_s=60) == ({"a": 1, "b": "µ"}, "ended with exit code 5: why")
    assert python("pass", timeout_s=60) == ({}, "ended with exit code 0")
    assert python("answer(x=sys.argv[1:])", "a", "b", timeout_s=60) == ({"x": ["a", "b"]}, "")
    assert python("_answers.write('{\"half\": ')", timeout_s=60) == ({}, "ended with exit code 0")


def test_the_child_sees_what_this_process_sees_and_not_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "made_here.py").write_text("")
    (tmp_path / "json.py").write_text("raise RuntimeError('the current folder was taken')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("path")                                     # relative, as sys.path entries may be
    assert python("import made_here; answer(well=True)", timeout_s=60) == ({"well": True}, "")


def test_a_program_that_is_not_there_raises():
    with pytest.raises(OSError):
        run(["/nothing/here"], timeout_s=1)
