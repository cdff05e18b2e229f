"""Adapters against peft: what is exported is what peft computes with, and what peft saves is what is read here."""

import numpy as np
import pytest

import maxtext_like
from maxtext_like.cli.main import main

torch = pytest.importorskip("torch", reason="needs the extra parity")
peft = pytest.importorskip("peft", reason="needs the extra parity")
transformers = pytest.importorskip("transformers", reason="needs the extra parity")

# peft and transformers warn of each other.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
GOLDEN = maxtext_like.__path__[0] + "/../tests/golden"
MODELS = [
  ("gemma3_text", "[all-linear]"),
  ("gemma4_dense", "[all-linear]"),
  ("gemma4_e2b", "[all-linear]"),
  ("gemma4_moe", "[all-linear]"),
  ("qwen3", "[q_proj, down_proj]"),
  ("deepseek3", "[attention, lm_head]"),
]
DORA = ["lora_dora=true", "lora_rslora=true"]
WITH_DORA = [("gemma3_text", "[all-linear]", DORA), ("deepseek3", "[attention, lm_head]", DORA)]
TOKENS = [[5, 6, 7, 8, 9, 10], [11, 4, 9, 20, 3, 6]]


def reference(checkpoint, adapter=None) -> np.ndarray:
  model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
  if adapter is not None:
    model = peft.PeftModel.from_pretrained(model, adapter).eval()
  with torch.no_grad():
    return model(input_ids=torch.tensor(TOKENS)).logits.numpy()


@pytest.mark.parametrize(("name", "modules", "more"), [*((*model, []) for model in MODELS), *WITH_DORA])
def test_an_exported_adapter_is_what_peft_computes_with(name, modules, more, tmp_path):
  checkpoint = f"{GOLDEN}/{name}/checkpoint"
  maxtext_like.import_checkpoint(checkpoint, tmp_path / "imported")
  words = ["lora_rank=3", "lora_alpha=6", f"lora_modules={modules}", "steps=3", "learning_rate=0.03", "dtype=float32", *more]
  words += ["dataset=synthetic", "tokenizer=bytes", "max_target_length=16", f"init_from={checkpoint}"]
  assert main(["train", str(tmp_path / "imported/model.yml"), *words, f"output_dir={tmp_path}", "run_name=run"]) == 0
  maxtext_like.export_adapter(tmp_path / "run", tmp_path / "adapter")
  theirs = reference(checkpoint, tmp_path / "adapter")
  ours = maxtext_like.load(checkpoint, adapters=tmp_path / "run", dtype="float32").logits(TOKENS)
  assert np.abs(theirs - reference(checkpoint)).max() > 0.1
  np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_of_peft_s_own_with_patterns(dora, tmp_path):
  checkpoint = f"{GOLDEN}/gemma3_text/checkpoint"
  model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
  config = peft.LoraConfig(
    r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], use_rslora=True, init_lora_weights=False,
    rank_pattern={"down_proj": 2}, alpha_pattern={"down_proj": 3}, use_dora=dora,
  )  # fmt: skip
  torch.manual_seed(0)
  adapted = peft.get_peft_model(model, config)
  with torch.no_grad():
    for key, value in adapted.named_parameters():  # magnitudes begin as the norms
      if "magnitude" in key:
        value.mul_(1 + 0.5 * torch.rand_like(value))
  adapted.save_pretrained(tmp_path / "adapter")
  with torch.no_grad():
    theirs = adapted.eval()(input_ids=torch.tensor(TOKENS)).logits.numpy()
  ours = maxtext_like.load(checkpoint, adapters=tmp_path / "adapter", dtype="float32").logits(TOKENS)
  np.testing.assert_allclose(ours, theirs, atol=1e-4 * max(1.0, float(np.abs(theirs).max()) / 10))
