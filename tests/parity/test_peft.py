"""Adapters compared with peft: an exported adapter gives the same logits in peft, and peft's adapters give the same here."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import maxtext_like
from maxtext_like.cli.main import main

torch = pytest.importorskip("torch", reason="needs the extra parity")
peft = pytest.importorskip("peft", reason="needs the extra parity")
Image = pytest.importorskip("PIL.Image", reason="needs the extra parity")
transformers = pytest.importorskip("transformers", reason="needs the extra parity")

# peft and transformers give warnings about each other.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
GOLDEN = maxtext_like.__path__[0] + "/../tests/golden"
MODELS = [
  ("gemma3_text", "[all-linear]"),
  ("gemma4_dense", "[all-linear]"),
  ("gemma4_e2b", "[all-linear]"),
  ("gemma4_moe", "[all-linear]"),
  ("qwen3", "[q_proj, down_proj]"),
  ("deepseek3", "[all-linear, lm_head]"),
]
EXPERTS = [
  ("gemma4_moe", "[experts, q_proj]", ["lora_rank_pattern={experts.up: 2}", "lora_alpha_pattern={experts.up: 9}"]),
  ("gemma4_moe", "[experts.down, router]", ["lora_rslora=true"]),
  ("qwen3_moe", "[experts, router]", []),
  ("qwen3_moe", "[layers.1.moe.experts.up, o_proj]", []),
  (
    "deepseek3",
    "[experts, router, all-linear]",
    ["lora_rslora=true", "lora_rank_pattern={layers.0.mlp.down: 2, router: 1}", "lora_alpha_pattern={shared.up: 9, router: 4}"],
  ),
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


@pytest.mark.parametrize(("name", "modules", "more"), [*((*model, []) for model in MODELS), *EXPERTS, *WITH_DORA])
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
  if "target_parameters" in json.loads((tmp_path / "adapter/adapter_config.json").read_text()):
    read = maxtext_like.load(checkpoint, adapters=tmp_path / "adapter", dtype="float32").logits(TOKENS)
    np.testing.assert_allclose(read, ours, atol=1e-5)


def trained_on(checkpoint, tmp_path, *words) -> tuple[np.ndarray, np.ndarray]:
  """Trains peft's adapter further and exports it again. Returns our logits, and those of peft with the exported adapter."""
  maxtext_like.import_checkpoint(checkpoint, tmp_path / "imported")
  given = [f"lora_from={tmp_path}/adapter", f"init_from={checkpoint}", "dtype=float32", "dataset=synthetic", "tokenizer=bytes"]
  given += ["max_target_length=16", f"output_dir={tmp_path}", "run_name=run", *words]
  assert main(["train", str(tmp_path / "imported/model.yml"), *given]) == 0
  maxtext_like.export_adapter(tmp_path / "run", tmp_path / "again")
  ours = np.asarray(maxtext_like.load(checkpoint, adapters=tmp_path / "run", dtype="float32").logits(TOKENS))
  return ours, reference(checkpoint, tmp_path / "again")


@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_of_peft_s_own_with_patterns(dora, tmp_path):
  checkpoint = f"{GOLDEN}/gemma3_text/checkpoint"
  model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
  config = peft.LoraConfig(
    r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], use_rslora=True, init_lora_weights=False,
    rank_pattern={"down_proj": 2}, alpha_pattern={"down_proj": 3, "layers.1.self_attn.q_proj": 5}, use_dora=dora,
  )  # fmt: skip
  torch.manual_seed(0)
  adapted = peft.get_peft_model(model, config)
  with torch.no_grad():
    for key, value in adapted.named_parameters():  # DoRA magnitudes are initialized to the norms
      if "magnitude" in key:
        value.mul_(1 + 0.5 * torch.rand_like(value))
  adapted.save_pretrained(tmp_path / "adapter")
  with torch.no_grad():
    theirs = adapted.eval()(input_ids=torch.tensor(TOKENS)).logits.numpy()
  ours = maxtext_like.load(checkpoint, adapters=tmp_path / "adapter", dtype="float32").logits(TOKENS)
  limit = 1e-4 * max(1.0, float(np.abs(theirs).max()) / 10)
  np.testing.assert_allclose(ours, theirs, atol=limit)
  ours, again = trained_on(checkpoint, tmp_path, "steps=2", "learning_rate=0.03")
  np.testing.assert_allclose(ours, again, atol=limit)
  assert np.abs(ours - theirs).max() > 0.1


@pytest.mark.parametrize(
  ("name", "targets"),
  [
    ("gemma4_moe", ["experts.gate_up_proj", "experts.down_proj"]),
    ("qwen3_moe", ["mlp.experts.gate_up_proj"]),
    (
      "deepseek3",
      ["model.layers.1.mlp.experts.down_proj", "experts.gate_up_proj", "gate.weight", "shared_experts.up_proj.weight"],
    ),
  ],
)
def test_additions_of_peft_s_own_to_parameters(name, targets, tmp_path):
  checkpoint = f"{GOLDEN}/{name}/checkpoint"
  model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
  config = peft.LoraConfig(
    r=3, lora_alpha=6, target_modules=["o_proj"], target_parameters=targets, init_lora_weights=False,
    rank_pattern={"experts.down_proj": 2}, alpha_pattern={"experts.gate_up_proj": 5, "up_proj": 50},
  )  # fmt: skip
  torch.manual_seed(0)
  adapted = peft.get_peft_model(model, config)
  adapted.save_pretrained(tmp_path / "adapter")
  with torch.no_grad():
    theirs = adapted.eval()(input_ids=torch.tensor(TOKENS)).logits.numpy()
  assert np.abs(theirs - reference(checkpoint)).max() > 0.1
  ours = maxtext_like.load(checkpoint, adapters=tmp_path / "adapter", dtype="float32").logits(TOKENS)
  limit = 1e-4 * max(1.0, float(np.abs(theirs).max()) / 10)
  np.testing.assert_allclose(ours, theirs, atol=limit)
  ours, again = trained_on(checkpoint, tmp_path, "steps=1", "learning_rate=0.01")
  np.testing.assert_allclose(ours, again, atol=limit)
  assert np.abs(ours - theirs).max() > 1e-3


TABLES = [("gemma3_text", ["embed_tokens"]), ("deepseek3", ["embed_tokens", "lm_head"]), ("deepseek3", ["lm_head"])]


@pytest.mark.parametrize(("name", "tables"), TABLES)
def test_tables_that_were_trained_whole_are_what_peft_saves_whole(name, tables, tmp_path):
  """modules_to_save works in export and in import. A head that is tied to the embedding stays tied."""
  checkpoint, tied = f"{GOLDEN}/{name}/checkpoint", name == "gemma3_text"
  maxtext_like.import_checkpoint(checkpoint, tmp_path / "imported")
  words = ["lora_rank=3", "lora_alpha=6", "lora_modules=[o_proj]", f"modules_to_save=[{', '.join(tables)}]"]
  run = ["steps=3", "learning_rate=0.03", "dtype=float32", "dataset=synthetic", "tokenizer=bytes", "max_target_length=16"]
  run += [f"init_from={checkpoint}", f"output_dir={tmp_path}"]
  model = str(tmp_path / "imported/model.yml")
  assert main(["train", model, *words, *run, "run_name=run"]) == 0
  maxtext_like.export_adapter(tmp_path / "run", tmp_path / "adapter")
  ours = maxtext_like.load(checkpoint, adapters=tmp_path / "run", dtype="float32").logits(TOKENS)
  limit = 1e-4 * max(1.0, float(np.abs(ours).max()) / 10)
  np.testing.assert_allclose(ours, reference(checkpoint, tmp_path / "adapter"), atol=limit)
  maxtext_like.export_checkpoint(tmp_path / "run", tmp_path / "merged", dtype="float32")
  np.testing.assert_allclose(ours, reference(tmp_path / "merged"), atol=limit)
  assert np.abs(ours - reference(checkpoint)).max() > 0.1
  # Load an adapter of peft here, and train it further.
  base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
  config = peft.LoraConfig(
    r=2, target_modules=["q_proj" if tied else "o_proj"], modules_to_save=tables, ensure_weight_tying=tied
  )
  torch.manual_seed(0)
  adapted = peft.get_peft_model(base, config)
  with torch.no_grad():
    for key, value in adapted.named_parameters():
      if value.requires_grad:
        value.add_(0.1 * torch.randn_like(value) * (1 if "lora" in key else value.std()))
  adapted.save_pretrained(tmp_path / "theirs")
  with torch.no_grad():
    theirs = adapted.eval()(input_ids=torch.tensor(TOKENS)).logits.numpy()
  limit = 1e-4 * max(1.0, float(np.abs(theirs).max()) / 10)
  ours = maxtext_like.load(checkpoint, adapters=tmp_path / "theirs", dtype="float32").logits(TOKENS)
  np.testing.assert_allclose(ours, theirs, atol=limit)
  assert main(["train", model, *run, f"lora_from={tmp_path}/theirs", "run_name=on"]) == 0
  maxtext_like.export_adapter(tmp_path / "on", tmp_path / "again")
  ours = maxtext_like.load(checkpoint, adapters=tmp_path / "on", dtype="float32").logits(TOKENS)
  np.testing.assert_allclose(ours, reference(checkpoint, tmp_path / "again"), atol=limit)
  assert np.abs(ours - theirs).max() > 0.1


@pytest.mark.parametrize(("name", "tower"), [("gemma3_vision", "projector"), ("gemma4_vision_small", "trained")])
def test_a_tower_that_was_trained_whole_is_what_peft_saves_whole(name, tower, tmp_path):
  """modules_to_save has the tower: peft with the exported adapter equals transformers with our merged checkpoint."""
  checkpoint = f"{GOLDEN}/{name}/checkpoint"
  numbers = np.random.default_rng(0)
  for i in range(4):
    Image.fromarray(numbers.integers(0, 255, (32, 32, 3)).astype(np.uint8)).save(tmp_path / f"{i}.png")
  records = ({"text": f"<image> {'ab'[i % 2]}", "images": [f"{i}.png"]} for i in range(4))
  (tmp_path / "rows.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
  words_of = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "a": 20, "b": 21}
  tokenizer = Tokenizer(models.WordLevel(words_of, unk_token="<unk>"))
  tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
  tokenizer.save(str(tmp_path / "tokenizer.json"))
  maxtext_like.import_checkpoint(checkpoint, tmp_path / "imported")
  words = ["lora_rank=3", "lora_alpha=6", "lora_modules=[q_proj]", "steps=3", "learning_rate=0.03", "dtype=float32"]
  words += ["use_multimodal=true", f"vision_tower={tower}", "dataset=jsonl", f"dataset_path={tmp_path}/rows.jsonl"]
  words += [f"tokenizer={tmp_path}/tokenizer.json", "eval_fraction=0", "packing=false", "max_target_length=64"]
  words += [f"init_from={checkpoint}", f"output_dir={tmp_path}", "run_name=run"]
  assert main(["train", str(tmp_path / "imported/model.yml"), *words]) == 0
  maxtext_like.export_adapter(tmp_path / "run", tmp_path / "adapter")
  maxtext_like.export_checkpoint(tmp_path / "run", tmp_path / "merged", dtype="float32")
  with np.load(f"{GOLDEN}/{name}/inputs.npz") as file:
    inputs = {key: torch.tensor(value) for key, value in file.items() if key != "labels"}

  def logits(place, adapter=None):
    model = transformers.AutoModelForImageTextToText.from_pretrained(place, dtype=torch.float32).eval()
    if adapter is not None:
      model = peft.PeftModel.from_pretrained(model, adapter).eval()
    with torch.no_grad():
      return model(**inputs).logits.numpy()

  theirs = logits(checkpoint, tmp_path / "adapter")
  assert np.abs(theirs - logits(checkpoint)).max() > 0.1
  np.testing.assert_allclose(logits(tmp_path / "merged"), theirs, atol=1e-4)
