"""Every test runs on the CPU, one thread a process, whatever the machine has."""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCHDYNAMO_DISABLE"] = "1"
