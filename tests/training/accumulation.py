"""Counts the reductions between devices in a step of two microbatches:
``python -m tests.training.accumulation "key=value ..." ...``, one argument per mesh.

Prints {"data": {executions per step: bytes}, "other": ...} for each mesh. "data" counts all-reduces and reduce-scatters between
devices at different positions of the mesh axis "data"; "other" counts those between devices at the same position.
"""

import collections
import json
import sys

from maxtext_like.capacity.compiled_program import _groups, read_program
from maxtext_like.config.load import load_config
from maxtext_like.sharding.mesh import make_mesh
from maxtext_like.training.step.program import make_program

SMALL = [
  "qwen3-tiny", "num_decoder_layers=2", "vocab_size=304", "max_target_length=16", "per_device_batch_size=1", "opt_type=sgd",
  "gradient_accumulation_steps=2",
]  # fmt: skip


def main(*words: str) -> dict[str, dict[int, int]]:
  """Return the counts of one mesh over all devices of this process."""
  config = load_config(SMALL[0], [*SMALL[1:], *words]).config
  program = make_program(config, mesh=make_mesh(config.mesh))
  text = program.lower_step().compile().as_text()
  behind = program.model.mesh.size // program.model.mesh.shape["data"]  # devices at one position of the first axis, "data"
  found = {"data": collections.Counter(), "other": collections.Counter()}
  for op, times in read_program(text).running():
    if op.kind in ("all-reduce", "reduce-scatter") and (groups := _groups(op.text)) is not None:
      over = "data" if (groups // behind != groups[:, :1] // behind).any() else "other"
      found[over][times] += sum(a.bytes for a in op.results)
  return {over: dict(counted) for over, counted in found.items()}


if __name__ == "__main__":
  print(json.dumps([main(*words.split()) for words in sys.argv[1:]]))
