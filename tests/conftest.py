"""One thread for every test: results do not depend on how many cores there are, and tests share a machine."""
import torch

torch.set_num_threads(1)
