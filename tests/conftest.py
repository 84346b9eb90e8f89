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
