"""Trains a model: ``python train.py configs/models/gemma4-31b.yml [key=value ...]``, the same as ``maxtext-like train``."""

import sys

from maxtext_like.cli.main import program

if __name__ == "__main__":
  sys.exit(program("train"))
