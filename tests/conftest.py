"""One thread and fixed examples for every test: results depend neither on the cores nor on luck."""
import os

import hypothesis
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None)
hypothesis.settings.register_profile("random", deadline=None)           # HYPOTHESIS_PROFILE=random looks further
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
