"""Notes of ``export``. The written files are tested in tests/checkpoint/huggingface and tests/training/adapters."""

import pytest

from maxtext_like.api.export import _row_notes

RESIZE = "the run added rows to the vocabulary of base (160 -> 166): call model.resize_token_embeddings(166) before PeftModel"


@pytest.mark.parametrize(
  ("rows", "saved", "said"),
  [
    ({}, (), []),
    ({"vocab_size": (160, 166)}, (), [f"{RESIZE}.from_pretrained; new rows are the mean of the others"]),
    ({"vocab_size": (160, 166)}, ("embed_tokens",), [f"{RESIZE}.from_pretrained; the rows of embed_tokens are in the adapter"]),
    ({"vocab_size": (160, 166), "vocab_size_per_layer_input": (160, 166)}, (), [f"{RESIZE}.from_pretrained; new rows are"]),
    ({"vocab_size_per_layer_input": (160, 166)}, (), ["the run added rows to embed_tokens_per_layer (160 -> 166), but "]),
  ],
)
def test_an_adapter_of_a_run_that_added_rows_names_the_resize_of_its_base(rows, saved, said):
  notes = _row_notes("base", rows, saved)
  assert len(notes) == len(said)
  assert all(note.startswith(begin) for note, begin in zip(notes, said, strict=True))
