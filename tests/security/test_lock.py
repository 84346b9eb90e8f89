"""The lock file has a version of all that pyproject.toml names, within its bounds, and names no place."""
import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "constraints.txt").read_text(encoding="utf-8")
LINES = [line for line in LOCK.splitlines() if line and not line.startswith("#")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def direct():
    """(where it stands, requirement) of every dependency, extra, group and build requirement."""
    yield from (("dependencies", one) for one in PROJECT["project"]["dependencies"])
    for extra, found in PROJECT["project"]["optional-dependencies"].items():
        yield from ((extra, one) for one in found)
    for group, found in PROJECT["dependency-groups"].items():
        yield from ((group, one) for one in found if isinstance(one, str))
    yield from (("build", one) for one in PROJECT["build-system"]["requires"])


def locked():
    found = {}
    for line in LINES:
        one = Requirement(line)
        (spec,) = one.specifier
        assert spec.operator == "==" and not one.extras and one.url is None
        found.setdefault(canonicalize_name(one.name), []).append(Version(spec.version))
    return found


@pytest.mark.parametrize("where, text", list(direct()))
def test_what_pyproject_names_is_locked_within_its_bounds(where, text):
    one = Requirement(text)
    versions = locked().get(canonicalize_name(one.name))
    assert versions, f"{one.name} ({where}) is not in constraints.txt: python tools/lock.py"
    assert all(one.specifier.contains(version, prereleases=True) for version in versions), "python tools/lock.py"


def test_it_names_no_place_and_no_hash_and_every_line_is_one_version():
    assert len(LINES) > 150 and not re.search(r"://|@|file:|--|\\|/|\bhash", "\n".join(LINES))
    assert all(re.fullmatch(r"[a-z0-9][\w.-]*(?<!-)==[\w.!+]+( ; [\w .<>=!'*()]+)?", line) for line in LINES)
    assert "docs/trust.md" in LOCK.splitlines()[0]


def test_torch_is_the_one_whose_cpu_build_the_checkout_takes():
    spec = importlib.util.spec_from_file_location("lock", ROOT / "tools" / "lock.py")
    lock = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lock)
    assert [str(version) for version in locked()["torch"]] == [lock.torch_version()]
