"""C files compiled at first use: once, whole or not at all, and a reason in words where that cannot be."""
import ctypes
import os
import stat

import pytest

from kvlab.kernels import compiled
from kvlab.kernels.compiled import CannotCompile, why_not


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    compiled.compiler.cache_clear()
    yield tmp_path / "cache" / "compiled"
    compiled.compiler.cache_clear()


@pytest.fixture
def real():
    try:
        return compiled.compiler()
    except CannotCompile as error:
        pytest.skip(str(error))


@pytest.fixture
def source(tmp_path):
    file = tmp_path / "answer.c"
    file.write_text("#ifndef ANSWER\n#define ANSWER 42\n#endif\nint answer(void) { return ANSWER; }\n"
                    "int main(void) { return answer(); }\n")
    return file


def program(folder, name, text):
    """An executable script, alone on PATH's first place."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(stat.S_IRWXU)
    return folder


def test_a_library_and_a_program_are_made_once_and_lie_alone_in_the_cache(real, source, own_cache):
    library = compiled.compiled((source,), shared=True)
    assert ctypes.CDLL(str(library)).answer() == 42
    again = library.stat().st_mtime_ns
    assert compiled.compiled((source,), shared=True) == library and library.stat().st_mtime_ns == again
    made = compiled.compiled((source,), shared=False)
    assert os.spawnv(os.P_WAIT, made, [str(made)]) == 42
    assert set(own_cache.iterdir()) == {library, made}, "nothing half written is left"


def test_another_text_or_flag_or_included_file_is_another_library(real, source, tmp_path):
    first = compiled.compiled((source,), shared=True)
    flagged = compiled.compiled((source,), shared=True, flags=("-DANSWER=7",))
    assert ctypes.CDLL(str(flagged)).answer() == 7 and flagged != first
    header = tmp_path / "more.h"
    header.write_text("/* more */")
    assert compiled.compiled((source, header), shared=True) not in (first, flagged)
    source.write_text("int answer(void) { return 43; }\n")
    assert ctypes.CDLL(str(compiled.compiled((source,), shared=True))).answer() == 43


def test_another_kind_of_machine_or_c_library_is_another_library(real, source, monkeypatch):
    first = compiled.compiled((source,), shared=True)
    monkeypatch.setattr(compiled.platform, "libc_ver", lambda: ("glibc", "1.0"))
    other = compiled.compiled((source,), shared=True)
    monkeypatch.setattr(compiled.platform, "machine", lambda: "elsewhere")
    assert len({first, other, compiled.compiled((source,), shared=True)}) == 3


def test_a_text_that_is_not_c_is_told_with_the_compilers_first_error_and_leaves_nothing(real, source, own_cache):
    source.write_text("int answer(void) { return missing_name; }\n")
    why = why_not((source,), shared=True)
    assert "cannot compile answer.c: " in why and "missing_name" in why
    assert list(own_cache.iterdir()) == []


def test_a_machine_without_a_compiler_says_what_to_install(source, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    why = why_not((source,), shared=True)
    assert "none of cc, gcc, clang is on PATH" in why and "apt-get install gcc libc6-dev" in why


def test_a_broken_compiler_is_passed_over_for_the_next_and_named_where_there_is_none(source, tmp_path, monkeypatch):
    folder = program(tmp_path / "bin", "cc", "echo cc is broken >&2; exit 3")
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    for name in ("gcc", "clang"):
        program(folder, name, "echo also broken >&2; exit 4")
    assert "cc --version ended with exit code 3: cc is broken" in why_not((source,), shared=True)
    program(folder, "gcc", "echo gcc 1.0")
    compiled.compiler.cache_clear()
    assert compiled.compiler() == (str(folder / "gcc"), "gcc 1.0\n")


def test_a_compiler_that_says_yes_and_writes_nothing_is_found_out(source, tmp_path, monkeypatch):
    folder = program(tmp_path / "bin", "cc", "exit 0")
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    assert "cc cannot compile answer.c: it left no file" in why_not((source,), shared=True)


def test_a_cache_that_cannot_be_written_names_the_variable_that_moves_it(real, source, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "file"))
    assert "set KVLAB_CACHE to a folder that can be written" in why_not((source,), shared=True)
