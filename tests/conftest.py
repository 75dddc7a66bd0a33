"""One thread for everything: the nets are small, and threads that wait for each other cost more than they bring."""

import atexit
import os
import shutil
import tempfile

import torch

os.environ["ANCHORHOLD_CACHE"] = tempfile.mkdtemp(prefix="anchorhold-cache-")  # not the user's
atexit.register(shutil.rmtree, os.environ["ANCHORHOLD_CACHE"], ignore_errors=True)

torch.set_num_threads(1)

# Some tests compute in a fork of this process. PyTorch refuses gradients there when its first gradient in this process
# came after an export (fake tensors make it believe in a GPU, whose threads forks lack). So the first one is here.
torch.ones(1, requires_grad=True).sum().backward()
