"""Greedy answers equal those of transformers, also for prompts with images. Needs the extra ``parity``."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from maxtext_like import load
from maxtext_like.generation.engine import Prompts, generate
from maxtext_like.generation.prompts import Prompt, encode
from maxtext_like.generation.sampling import Sampling
from tests.generation.letters import copy_golden
from tests.models.test_golden import GOLDEN
from tests.tiers import tiers

torch = pytest.importorskip("torch", reason="needs the extra parity")
transformers = pytest.importorskip("transformers", reason="needs the extra parity")
TOKENS = 12
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/checkpoint"))


@pytest.mark.parametrize("case", tiers(CASES, slow=["deepseek32", "gemma4_e2b"]))
def test_greedy_answers_of_every_model(case: str):
  """Three prompts of different lengths share two slots. Rows of layers have separate parameters, as on a GPU."""
  folder = GOLDEN / case / "checkpoint"
  model = load(folder, "dtype=float32", "matmul_precision=highest")
  decoder, draw = model.model.decoder, np.random.default_rng(4)
  usual = np.setdiff1d(np.arange(5, decoder.cfg.lookup.rows), decoder.cfg.placeholder_ids)
  prompts = [draw.choice(usual, length).tolist() for length in (13, 3, 20)]
  ours: list[list[int]] = [[] for _ in prompts]
  params, greedy = decoder.apart(model.params), Sampling(temperature=0.0)
  for rows in generate(decoder, params, Prompts(prompts), max_tokens=TOKENS, stop=frozenset(), sampling=greedy, slots=2):
    for answer, new in zip(ours, rows, strict=True):
      answer += new
  kind = transformers.AutoModelForImageTextToText if "vision" in case else transformers.AutoModelForCausalLM
  theirs = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
  how = {"do_sample": False, "max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "eos_token_id": [], "pad_token_id": 0}
  for prompt, answer in zip(prompts, ours, strict=True):
    with torch.no_grad():
      made = theirs.generate(input_ids=torch.tensor([prompt]), attention_mask=torch.ones((1, len(prompt))), **how)
    assert answer == made[0, len(prompt) :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gemma3_vision", "gemma4_vision_large", "gemma4_vision_small"])
def test_greedy_answers_with_images(case: str, tmp_path: Path):
  folder = copy_golden(case, tmp_path / "model")
  for name, size in (("wide.png", (20, 50)), ("tall.png", (40, 15))):
    Image.fromarray(np.random.default_rng(2).integers(0, 255, (*size, 3)).astype(np.uint8)).save(folder / name)
  images = (str(folder / "wide.png"), str(folder / "tall.png"))
  model = load(folder, "dtype=float32", "matmul_precision=highest", images=True)
  prompts = encode([Prompt("what <image> is <image> this", images)], model.tokenizer, model.model.config.vision)
  ours: list[int] = []
  params, greedy = model.params, Sampling(temperature=0.0)
  for rows in generate(model.model.decoder, params, prompts, max_tokens=TOKENS, stop=frozenset(), sampling=greedy):
    ours += rows[0]
  assert prompts.images is not None
  arrays = {name: torch.tensor(array) for name, array in prompts.images.items()}
  if "image_position_ids" in arrays:
    arrays["image_position_ids"] = arrays["image_position_ids"].long()
  types = "token_type_ids" if case == "gemma3_vision" else "mm_token_type_ids"
  theirs = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
  with torch.no_grad():
    made = theirs.generate(
      input_ids=torch.tensor([list(prompts.tokens[0])]),
      attention_mask=torch.ones((1, len(prompts.tokens[0])), dtype=torch.long),
      do_sample=False,
      max_new_tokens=TOKENS,
      min_new_tokens=TOKENS,
      eos_token_id=[],
      pad_token_id=0,
      **arrays,
      **{types: torch.tensor([list((prompts.token_types or [[]])[0])])},
    )
  assert ours == made[0, len(prompts.tokens[0]) :].tolist()
