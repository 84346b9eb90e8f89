#!/bin/sh
# Creates or refreshes .venv with kvlab, its notebook extra and the development tools. `make venv` calls it.
#
# PYTHON  the Python (3.11 or newer) that makes the environment; default python3
# TORCH   another torch: a requirement for pip, options allowed, as in TORCH="torch==2.12.0 --index-url URL"
#
# On Linux the torch that PyPI serves is a CUDA build of several GB, so without an NVIDIA GPU a CPU build is tried
# first. A torch that is in .venv and fits is replaced only where TORCH says so. Where nothing has changed since the
# last run (the stamp: this checkout's path, then TORCH), the script returns at once.
set -eu
cd "$(dirname "$0")/.."
: "${PYTHON:=python3}" "${TORCH:=}"
fits="torch>=2.11,<3"
cpu_build="torch==2.13.0+cpu"      # pip finds it where the user's own sources hold CPU builds, else fails in seconds
py=.venv/bin/python
stamp=.venv/kvlab-stamp
pin=.venv/kvlab-torch.txt

say() { echo "make venv: $*" >&2; }
has() { command -v "$1" >/dev/null 2>&1; }
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
pip() { "$py" -m pip --disable-pip-version-check "$@"; }
stamped() { sed -n "$1p" "$stamp" 2>/dev/null; }

install() {                        # uv where it is present (several times faster), else pip
    if has uv; then uv pip install --python "$py" "$@"; else pip install -qq "$@"; fi
}

torch_version() {                  # prints the version where .venv holds a torch that fits, else fails
    "$py" - <<'END'
import importlib.metadata, sys
try:
    version = importlib.metadata.version("torch")
except importlib.metadata.PackageNotFoundError:
    sys.exit(1)
if not (2, 11) <= tuple(map(int, version.split(".")[:2])) < (3, 0):
    sys.exit(1)
print(version)
END
}

is_current() {
    [ -x .venv/bin/kvlab ] && [ "$(stamped 1)" = "$PWD" ] && { [ -z "$TORCH" ] || [ "$(stamped 2)" = "$TORCH" ]; } &&
        [ -z "$(find pyproject.toml tools/venv.sh -newer "$stamp")" ] && [ "torch==$(torch_version)" = "$(cat "$pin")" ]
}

create() {                         # python3 by default; where that one is too old, a newer one beside it
    for python in "$PYTHON" python3.14 python3.13 python3.12 python3.11; do
        new_enough "$python" || continue
        say "creating .venv with $("$python" --version)"
        "$python" -m venv --clear .venv
        return
    done
    say "kvlab needs Python 3.11 or newer and found none; install one, or name it: make PYTHON=/path/to/python3"
    return 1
}

install_torch() {
    if [ -n "$TORCH" ]; then
        say "installing $TORCH"
        pip install -qq $TORCH                         # unquoted: TORCH may carry options
    elif version=$(torch_version); then
        say "keeping torch $version"
    elif [ "$(uname -s)" != Linux ] || nvidia-smi -L >/dev/null 2>&1; then
        say "installing $fits"
        install "$fits"
    elif say "no NVIDIA GPU: looking for a CPU build of torch"; pip install -qq "$cpu_build" 2>/dev/null; then
        :
    elif has uv && uv pip install --python "$py" --torch-backend=cpu "$fits"; then
        :
    else
        say "no CPU build of torch found, so PyPI's follows: on Linux the CUDA build of several GB. To avoid it, stop" \
            "here, install uv and run this again, or name a source of CPU builds: TORCH=\"torch --index-url URL\""
        install "$fits"
    fi
}

if is_current; then exit 0; fi
if ! new_enough "$py" || { [ -f "$stamp" ] && [ "$(stamped 1)" != "$PWD" ]; }; then
    create                         # none yet, or the checkout was moved: the scripts in .venv/bin hold its old path
fi
rm -f "$stamp"
"$py" -m pip --version >/dev/null 2>&1 || "$py" -m ensurepip >/dev/null
install_torch
version=$(torch_version) || { say "kvlab needs $fits, and ${TORCH:-what was installed} is not that"; exit 1; }
echo "torch==$version" >"$pin"
say "installing kvlab and its tools beside torch $version (seconds with uv, a few minutes with pip)"
has uv || pip install -qq --upgrade "pip>=25.1"        # older ones do not know --group
install --constraint "$pin" --editable ".[notebook,models]" --group dev
printf '%s\n%s\n' "$PWD" "$TORCH" >"$stamp"
say "ready: .venv/bin/kvlab"
