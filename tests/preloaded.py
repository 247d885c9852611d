"""What most programs of tests import. tests/processes.py forks from a process that has done it."""

import gc

import torch
from transformers import Trainer

import tsemon.cli
import tsemon.demo
import tsemon.train.training
import tsemon_server.main

__all__ = ["Trainer", "torch", "tsemon", "tsemon_server"]

torch.set_num_threads(1)
gc.freeze()  # or each child would copy it all when it looks through it for garbage
