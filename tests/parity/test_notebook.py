"""The notebook that compares a model with transformers runs without errors and finds the same results."""

import re

import pytest

from tests.notebooks import EXAMPLES, execute, text_of
from tests.processes import environment

pytest.importorskip("torch", reason="needs the extra parity")
pytest.importorskip("transformers", reason="needs the extra parity")


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a new Jupyter kernel compiles everything again
def test_logits_layers_and_text_equal_those_of_transformers():
  text = text_of(execute(EXAMPLES / "compare_with_transformers.ipynb", environment()))
  differences = [float(number) for number in re.findall(r"largest difference ([\d.e+-]+)", text)]
  assert len(differences) == 1 + 7  # logits; embedding, five layers, final norm
  assert max(differences) < 1e-4
  ours, theirs = re.findall(r"^(?:maxtext_like|transformers): (\[.*\])$", text, flags=re.MULTILINE)
  assert ours == theirs
  assert ours.count(",") == 11
