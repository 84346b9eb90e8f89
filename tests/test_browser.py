"""The notebooks as a person sees them: JupyterLab in a real browser, every cell run, a slider moved, the answer read.

Needs Chromium on the machine and the dependency group `browser`. The default run looks at 00_first_look only;
KVLAB_BROWSER=all looks at every notebook. The screen is kept as <notebook>.png in pytest's folder of the session.
"""
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="the extra `notebook` is not installed")
pytest.importorskip("jupyterlab", reason="the extra `notebook` is not installed")
playwright = pytest.importorskip("playwright.sync_api", reason="the dependency group `browser` is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed on this machine")

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
LOOKED_AT = NOTEBOOKS if os.environ.get("KVLAB_BROWSER") == "all" else ["00_first_look"]
KERNEL = "window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel"
EXPLORER = ".jp-OutputArea-output .widget-vbox:has(.kvlab-numbers)"


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """JupyterLab over copies of the notebooks without their outputs; yields the URL of its tree and the token."""
    folder = tmp_path_factory.mktemp("lab")
    (folder / "work" / "notebooks").mkdir(parents=True)
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        notebook = nbformat.read(path, 4)
        for cell in notebook.cells:
            cell.update(outputs=[]) if cell.cell_type == "code" else None
        nbformat.write(notebook, folder / "work" / "notebooks" / path.name)
    settings = folder / "settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    settings.parent.mkdir(parents=True)
    settings.write_text(json.dumps({"fetchNews": "false", "checkForUpdates": False}))      # else a toast covers cells
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token, root = secrets.token_hex(16), folder / "work"
    places = {f"JUPYTER{name}_DIR": str(folder / name.lower()) for name in ("_CONFIG", "_RUNTIME", "LAB_WORKSPACES")}
    with open(folder / "lab.log", "w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}",
             "--ServerApp.port_retries=0", f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={root}",
             "--LabApp.expose_app_in_browser=True"], stdout=log, stderr=log,
            env={**os.environ, **places, "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"), "PYTHONPATH": str(ROOT)})
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api?token={token}", timeout=2)
                break
            except OSError:
                assert server.poll() is None, (folder / "lab.log").read_text()[-2000:]
                time.sleep(0.25)
        yield f"http://127.0.0.1:{port}/lab/tree/notebooks", token
    finally:
        server.terminate()
        try:
            server.wait(15)
        except subprocess.TimeoutExpired:
            server.kill()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        one = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage",
                                                                     "--disable-gpu"])
        yield one
        one.close()


@pytest.fixture(scope="module", params=LOOKED_AT)
def page(request, lab, browser, tmp_path_factory):
    """The notebook after all its cells ran, in a window tall enough for it: what scrolls away is not in the page."""
    url, token = lab
    page = browser.new_page(viewport={"width": 1400, "height": 9000})
    page.asked = []
    page.on("request", lambda asked: page.asked.append(asked.url))
    page.goto(f"{url}/{request.param}.ipynb?token={token}&reset", wait_until="domcontentloaded")
    page.wait_for_selector(".jp-NotebookPanel .jp-Notebook-cell", timeout=60_000)
    page.wait_for_function(f"() => {KERNEL}?.status === 'idle'", timeout=60_000)
    page.set_default_timeout(20_000)
    page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-all-cells')")     # waits for the last cell
    page.wait_for_selector(".jp-RenderedImage img")
    page.screenshot(path=tmp_path_factory.getbasetemp() / f"{request.param}.png")
    yield page
    page.close()


def test_every_cell_runs_figures_are_seen_and_nothing_comes_from_a_network(page):
    widths = page.evaluate("() => [...document.querySelectorAll('.jp-RenderedImage img')].map(i => i.naturalWidth)")
    errors = page.locator("[data-mime-type*='error'], [data-mime-type*='stderr']").all_inner_texts()
    bars = page.evaluate("() => [...document.querySelectorAll('.widget-hprogress .progress-bar')]"
                         ".map(bar => bar.style.width)")
    assert widths and min(widths) > 1000 and errors == [] and set(bars) <= {"100%"}
    assert [url for url in page.asked if not url.startswith(("http://127.0.0.1", "data:", "blob:"))] == []


@pytest.mark.parametrize("page", ["00_first_look"], indirect=True)
def test_progress_is_shown_and_has_come_to_its_end(page):
    label = page.locator(".widget-hbox:has(.widget-hprogress)").inner_text()
    assert "100%" in label and "3/3" in label


@pytest.mark.parametrize("page", ["00_first_look"], indirect=True)
def test_a_slider_moved_by_a_key_is_answered_with_exact_bytes(page):
    explorer = page.locator(EXPLORER).last
    explorer.get_by_text("21,474,836,480 B").first.wait_for()                               # 16 sequences
    explorer.locator(".widget-inline-hbox", has_text="sequences").locator(".noUi-handle").press("ArrowRight")
    explorer.get_by_text("42,949,672,960 B").first.wait_for()


@pytest.mark.parametrize("page", ["00_first_look"], indirect=True)
def test_a_choice_that_cannot_be_is_a_sentence_and_no_picture(page):
    explorer = page.locator(EXPLORER).last
    explorer.locator("select").first.select_option("tiiuae/falcon-7b")                      # 71 query heads, tp 8
    refused = page.get_by_text("tp=8 does not fit the heads")
    refused.wait_for()
    assert page.locator(".widget-vbox", has=refused).locator("img").is_hidden()


@pytest.mark.parametrize("page", ["00_first_look"], indirect=True)
def test_the_table_of_models_is_searched(page):
    page.locator(".dt-search input").fill("deepseek-v3.2")
    page.get_by_text("Showing 1 to 1 of 1 entry (filtered from").wait_for()
