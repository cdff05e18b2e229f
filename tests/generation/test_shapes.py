"""The shapes of generation programs: only a few exist, so that few programs are compiled."""

from maxtext_like.generation import shapes


def test_chunks_cover_a_prompt():
  found = set()
  for length in range(1, 2000, 7):
    chunks = shapes.chunks_of(length, together=False)
    assert sum(chunks[:-1]) < length <= sum(chunks)
    assert all(size == shapes.CHUNKS[-1] for size in chunks[:-1])
    found |= set(chunks)
  assert found == set(shapes.CHUNKS)
  assert shapes.chunks_of(700, together=True) == [1024]
  assert shapes.chunks_of(3, together=True) == [16]


def test_slots_and_rows():
  assert [shapes.slots_for(n, 64) for n in (1, 2, 3, 64, 65, 9999)] == [2, 2, 4, 64, 64, 64]
  assert shapes.slots_for(5, 1) == 1
  assert [shapes.prefill_rows(chunk, 64) for chunk in (16, 256, 512, 4096)] == [8, 4, 2, 1]
  assert shapes.prefill_rows(16, 2) == 2


def test_capacities():
  assert shapes.first_capacity([10, 130], 384) == 384
  assert shapes.first_capacity([10], 20) == 128
  assert shapes.first_capacity([10], 5000) == 1024
  assert shapes.grown_capacity(1024, 5000) == 1024
  assert shapes.grown_capacity(1025, 5000) == 2048
  assert shapes.grown_capacity(4097, 5000) == 5120, "not more than the longest row needs"
