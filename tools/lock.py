"""The lock file constraints.txt: one version of every package that kvlab, its extras and its groups need.

    python tools/lock.py             what pyproject.toml asks for now; versions that still fit stay as they are
    python tools/lock.py --upgrade   the newest versions that fit together

It holds for every platform and for Python 3.11 and newer (uv's universal resolution, markers on the lines), and names
no index, host, path or hash: whoever installs takes the packages from where they always do. Hashes would have pip
refuse what no hash is known of: the checkout itself, installed editable, and CPU builds of torch. torch is locked to
the version whose CPU build tools/venv.sh looks for, so that both builds agree.
"""
from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "constraints.txt"
OLDEST = "3.11"
HEAD = """\
# Made by tools/lock.py from pyproject.toml. To install from it, and to renew it: docs/trust.md.
"""


def torch_version() -> str:
    """The torch whose CPU build tools/venv.sh looks for, without its local part."""
    return re.findall(r'^cpu_build="torch==([\d.]+)', (ROOT / "tools" / "venv.sh").read_text(), re.M)[0]


def compile_lock(uv: str, upgrade: bool) -> None:
    """Resolve all extras, groups and build requirements together and write the lines; uv says what cannot be had."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        pins, build, out = (Path(folder, name) for name in ("torch.txt", "build.in", "constraints.txt"))
        pins.write_text(f"torch=={torch_version()}\n")
        build.write_text("\n".join(project["build-system"]["requires"]) + "\n")
        if LOCK.exists() and not upgrade:
            shutil.copy(LOCK, out)                           # uv keeps the versions in it where they fit
        groups = [word for name in project["dependency-groups"] for word in ("--group", name)]
        subprocess.run([uv, "pip", "compile", "pyproject.toml", str(build), "--universal", "--python-version", OLDEST,
                        "--all-extras", *groups, "--constraint", str(pins), "--no-header", "--no-annotate",
                        "--no-emit-index-url", "--no-emit-find-links", "--quiet", "--output-file", str(out)],
                       cwd=ROOT, check=True)
        LOCK.write_text(HEAD + out.read_text(encoding="utf-8"), encoding="utf-8")


def main() -> int:
    options = argparse.ArgumentParser(description="Write constraints.txt, the lock file.")
    options.add_argument("--upgrade", action="store_true", help="take the newest versions that fit together")
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        uv = shutil.which("uv")
        try:
            if uv is None:                                   # into a passing environment: nobody's own is touched
                venv.create(folder, with_pip=True)
                scripts = Path(folder, "Scripts" if sys.platform == "win32" else "bin")
                subprocess.run([str(scripts / "python"), "-m", "pip", "install", "-q", "uv"], check=True)
                uv = str(scripts / "uv")
            compile_lock(uv, asked.upgrade)
        except subprocess.CalledProcessError as error:
            print(f"lock: {Path(error.cmd[0]).name} gave up with code {error.returncode}, see above; "
                  f"{LOCK.name} is as it was", file=sys.stderr)
            return 1
    print(f"{LOCK.name}: {sum('==' in line for line in LOCK.read_text().splitlines())} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
