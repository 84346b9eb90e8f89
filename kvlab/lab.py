"""JupyterLab on kvlab's notebooks with this environment's kernel, for this machine's own user only."""
from __future__ import annotations

import importlib.util
import os
import secrets
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from kvlab.registry import no_such

PROVIDERS = ("IdentityProvider", "PasswordIdentityProvider")   # a user's line for the second would win over the first
# Given as arguments, which win over every configuration file. The token joins them only inside the process: what a
# program is started with, every user of the machine can read.
OURS = {"ServerApp.ip": "127.0.0.1", "ServerApp.sock": "", "ServerApp.allow_unauthenticated_access": False,
        "ServerApp.identity_provider_class": "jupyter_server.auth.identity.PasswordIdentityProvider",
        "PasswordIdentityProvider.hashed_password": ""}


@dataclass(frozen=True)
class Lab:
    """A JupyterLab that can be started: its arguments (without the token), the notebook it opens, what to say before.

    path: the notebook below the server's folder, "" for the folder itself.
    """
    arguments: list[str]
    folder: Path
    path: str
    said: tuple[str, ...]


def lab(notebook: str | None = None, *, port: int | None = None, browser: bool = True) -> Lab:
    """JupyterLab on the folder notebooks/ (of kvlab's checkout, else of the current folder, else that itself).

    notebook: a path, or the name of one in that folder. It listens on 127.0.0.1 only and asks for a new token each
    time, whatever the user's Jupyter configuration says. Refused: JupyterLab not installed, a port outside 1024 …
    65535 (ValueError), a notebook that does not exist (KeyError).
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
    arguments = [*(f"--{name}={value}" for name, value in OURS.items()), f"--ServerApp.root_dir={folder}", *opened]
    if port is not None:
        arguments += [f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    if not browser:
        arguments.append("--no-browser")
    if getattr(os, "geteuid", lambda: 1)() == 0:
        arguments.append("--allow-root")                     # in a container there is often no other user
    return Lab(arguments, folder, path.name if opened else "", said)


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


def start(one: Lab) -> int:
    """Serve in this process until it ends; Ctrl-C is Jupyter's, which asks before it stops.

    Prints the URL with the token once it answers: nobody else can say it. Refused: a configuration that opens the
    server after all.
    """
    # this environment's own kernel before any other of the same name: a user's python3 may be somebody else's
    own = str(Path(sys.prefix, "share", "jupyter"))
    os.environ["JUPYTER_PATH"] = os.pathsep.join(filter(None, [own, os.environ.get("JUPYTER_PATH")]))
    from jupyterlab.labapp import LabApp
    # of extensions that check a token themselves: with our setting the server does so before them
    warnings.filterwarnings("ignore", message="(?s).*endpoints without @allow_unauthenticated")
    token = secrets.token_hex(24)
    server = LabApp.initialize_server([*one.arguments, *(f"--{provider}.token={token}" for provider in PROVIDERS)])
    _check_shut(server, token)
    where = "/".join(["lab", *(["tree", quote(one.path)] if one.path else [])])
    # the socket is bound by the loop's first callback; printed before, the URL would be refused for a moment
    server.io_loop.add_callback(print, f"kvlab lab: {server.connection_url}{where}?token={token}", flush=True)
    server.start()
    return 0


def _check_shut(server, token: str) -> None:
    """ValueError where the server that was set up, and does not answer yet, is not shut as it should be."""
    provider = server.identity_provider
    found = {"ServerApp.ip": server.ip, "ServerApp.sock": server.sock,
             "ServerApp.allow_unauthenticated_access": getattr(server, "allow_unauthenticated_access", False),
             "ServerApp.identity_provider_class": f"{type(provider).__module__}.{type(provider).__qualname__}",
             "PasswordIdentityProvider.hashed_password": getattr(provider, "hashed_password", "")}
    wrong = [name for name, value in OURS.items() if found[name] != value]
    if provider.token != token or not provider.auth_enabled or server.web_app.settings["identity_provider"] != provider:
        wrong.append("IdentityProvider.token")
    if wrong:
        raise ValueError(f"the server would be open to others: a Jupyter configuration holds on to {', '.join(wrong)}; "
                         "remove that (`python -m jupyter --paths` lists the folders), or set JUPYTER_NO_CONFIG=1")
