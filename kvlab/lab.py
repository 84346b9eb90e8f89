"""JupyterLab on kvlab's notebooks with this environment's kernel, for this machine's own user only."""
from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from kvlab.registry import no_such


@dataclass(frozen=True)
class Lab:
    """A JupyterLab that can be started: argument list, environment, the folder it opens and what to say before."""
    command: list[str]
    environment: dict[str, str]
    folder: Path
    said: tuple[str, ...]


def lab(notebook: str | None = None, *, port: int | None = None, browser: bool = True) -> Lab:
    """JupyterLab on the folder notebooks/ (of kvlab's checkout, else of the current folder, else that itself).

    notebook: a path, or the name of one in that folder. It listens on 127.0.0.1 only and asks for a token, which
    Jupyter makes (or takes from JUPYTER_TOKEN) and prints in its own URL; it is never an argument, which every user
    of the machine could read. Refused: JupyterLab not installed, a port outside 1024 … 65535 (ValueError), a notebook
    that does not exist (KeyError).
    """
    if importlib.util.find_spec("jupyterlab") is None:
        raise ValueError("JupyterLab is not installed in this environment; install it with: "
                         "pip install 'kvlab[notebook]'")
    if port is not None and not 1024 <= port <= 65535:
        raise ValueError(f"port {port} must be 1024 … 65535, or be left out: then a free one is taken")
    folder, said = _folder()
    opened = []
    if notebook is not None:
        path = _notebook(notebook, folder)
        folder, opened = path.parent, [str(path)]
    command = [sys.executable, "-m", "jupyterlab", "--ServerApp.ip=127.0.0.1", f"--ServerApp.root_dir={folder}",
               *opened]
    if port is not None:
        command += [f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    if not browser:
        command.append("--no-browser")
    if getattr(os, "geteuid", lambda: 1)() == 0:
        command.append("--allow-root")                       # in a container there is often no other user
    return Lab(command, _environment(), folder, said)


def _folder() -> tuple[Path, tuple[str, ...]]:
    here = Path.cwd()
    for folder in (Path(__file__).resolve().parents[1] / "notebooks", here / "notebooks"):
        if folder.is_dir():
            return folder, ()
    return here, ("there is no folder notebooks here (an installed kvlab brings none; its repository does): opening "
                  "the current folder",)


def _notebook(text: str, folder: Path) -> Path:
    for path in (Path(text), folder / text, folder / f"{text}.ipynb"):
        if path.is_file() and path.suffix == ".ipynb":
            return path.resolve()
    raise no_such("notebook", text, [path.stem for path in folder.glob("*.ipynb")])


def _environment() -> dict[str, str]:
    """This environment's own kernel before any other of the same name: a user's python3 may be somebody else's."""
    own = str(Path(sys.prefix, "share", "jupyter"))
    return {**os.environ, "JUPYTER_PATH": os.pathsep.join(filter(None, [own, os.environ.get("JUPYTER_PATH")]))}


def start(one: Lab) -> int:
    """Run it in the foreground until it ends; Ctrl-C is Jupyter's, which asks before it stops."""
    if os.name == "posix":
        sys.stdout.flush()
        os.execve(one.command[0], one.command, one.environment)
    child = subprocess.Popen(one.command, env=one.environment)
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:
            continue
