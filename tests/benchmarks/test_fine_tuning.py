"""A shorter version of ``benchmarks/fine_tuning.py``, which shows that fine-tuning teaches a model a format."""

import pytest

from benchmarks import fine_tuning


def test_held_out_lines_are_of_other_files_and_kinds_are_even(tmp_path):
  held = fine_tuning.write_conversations(tmp_path)
  learned = (tmp_path / "learn.jsonl").read_text()
  assert not any(f'"content": "{text}"' in learned for text, _ in held if '"' not in text)
  count = {kind: learned.count(f'{{\\"kind\\": \\"{kind}\\"}}') for kind in fine_tuning.KINDS}
  assert min(count.values()) > 100
  assert max(count.values()) <= fine_tuning.EACH


@pytest.mark.nightly
def test_an_adapter_in_float16_learns_the_format(tmp_path, monkeypatch):
  monkeypatch.setitem(fine_tuning.PRETRAINING, "steps", 60)
  monkeypatch.setattr(fine_tuning, "EACH", 200)
  monkeypatch.setattr(fine_tuning, "HELD_OUT_EACH", 20)
  monkeypatch.setattr(fine_tuning, "WAYS", {"LoRA": fine_tuning.LORA})
  monkeypatch.setattr(fine_tuning, "DTYPES", ("float16",))
  ((way, dtype, before, after, loss, _),) = fine_tuning.rows(tmp_path, "")
  assert (way, dtype) == ("LoRA", "float16")
  assert before < 0.05
  assert after > 0.95
  assert loss < 0.1
