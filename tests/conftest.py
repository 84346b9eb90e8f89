"""One thread and fixed examples for every test: results depend neither on the cores nor on luck."""
import os
import signal

import hypothesis
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None)
hypothesis.settings.register_profile("random", deadline=None)           # HYPOTHESIS_PROFILE=random looks further
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

# A shell that starts a command in the background has it ignore Ctrl-C, and so would every process started here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Files that take a minute and more, longest first: left for the end, one process would wait for the other.
LONG = ("test_notebooks.py", "test_cli.py", "test_callgrind.py", "test_ray.py", "test_worker.py", "test_make.py",
        "test_triton_compiled.py", "test_bench.py", "test_variants.py", "test_drill.py")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
