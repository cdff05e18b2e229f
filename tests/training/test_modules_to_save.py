"""Tables that are trained completely in addition to an adapter (``modules_to_save``): checkpoints, resumes, files for peft, and
refusals."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import maxtext_like
from maxtext_like.checkpoint.store import manifest
from maxtext_like.cli.main import main
from maxtext_like.config.load import load_config
from maxtext_like.errors import UserError
from maxtext_like.models.naming import ADAPTER
from maxtext_like.training.step.program import make_program

pytestmark = pytest.mark.slow  # the runs that all tests read take half a minute

WORDS = ["max_target_length=16", "per_device_batch_size=2", "num_decoder_layers=2", "emb_dim=32", "mlp_dim=48"]
WORDS += ["inhomogeneous_layer_cycle_interval=1", "lr_schedule_type=constant", "warmup_steps_fraction=0"]
WORDS += ["dataset=text", "eval_fraction=0", "weight_dtype=bfloat16", "learning_rate=0.02", "checkpoint_interval=2"]
TABLE = ["lora_rank=3", "lora_alpha=6", "lora_modules=[q_proj]", "modules_to_save=[embed_tokens]"]
HEAD, EMBEDDING = "base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"


def train(place: Path, name: str, *words: str) -> int:
  settings = [f"output_dir={place}", f"run_name={name}", f"compilation_cache_dir={place}/cache"]
  return main(["train", "gemma3-tiny", *WORDS, *settings, f"dataset_path={place}/text.txt", *words])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
  place = tmp_path_factory.mktemp("runs")
  (place / "text.txt").write_text("The fox runs. The hen sits. " * 60)
  assert train(place, "base", "steps=1") == 0
  assert train(place, "whole", f"init_from={place}/base", *TABLE, "base_weights=nf4", "dtype=float16", "steps=4") == 0
  maxtext_like.export_adapter(place / "whole", place / "peft")
  return place


def test_the_table_is_trained_in_float32_and_its_own_stays_below(place, capsys):
  stored = manifest.read(place / "whole/checkpoints/4")
  leaves = {name: leaf["dtype"] for name, leaf in stored.leaves.items() if name.startswith("params.")}
  tables = {name: dtype for name, dtype in leaves.items() if "table" in name}
  assert tables == {"params.adapter.embedding.table.whole": "float32"}
  assert all(".attention.q.lora_" in name for name in leaves.keys() - tables.keys())
  losses = [json.loads(line)["loss"] for line in (place / "whole/metrics.jsonl").read_text().splitlines()]
  assert losses[-1] < losses[0] - 0.5


def test_what_rounding_changes_of_a_table_is_told():
  """The LoRA factors add zero, and the table has changed. So the reported rounding is that of the table alone."""
  program = make_program(load_config("gemma3-tiny", [*WORDS, *TABLE, "dataset_path=none.txt"]).config)
  adapter = program.adapter
  assert adapter is not None
  params = program.lower_init().compile()(np.uint32(0))["params"]
  below = np.asarray(params["embedding"]["table"], np.float32)
  moved = below + np.random.default_rng(0).normal(0, 0.01, below.shape).astype(np.float32)
  params[ADAPTER]["embedding"]["table"]["whole"] = jnp.asarray(moved)
  rounded = np.asarray(jnp.asarray(moved).astype("bfloat16"), np.float32)
  expected = np.linalg.norm(rounded - moved) / np.linalg.norm(moved - below)
  assert adapter.merge(params, "bfloat16").rounding == pytest.approx(expected, rel=1e-3)
  assert adapter.merge(params, "float32").rounding == 0


def test_a_run_that_was_stopped_goes_on_to_the_bit(place, capsys):
  words = (f"init_from={place}/base", *TABLE, "base_weights=nf4", "dtype=float16")
  assert train(place, "parts", *words, "steps=2") == 0
  assert train(place, "parts", *words, "steps=4") == 0
  assert "; embedding.table trained completely\n" in capsys.readouterr().out
  one, other = (load_file(export(place / name, place / f"of-{name}")) for name in ("whole", "parts"))
  assert one.keys() == other.keys()
  for name, array in one.items():
    np.testing.assert_array_equal(array, other[name], err_msg=name)


def export(run: Path, out: Path) -> Path:
  maxtext_like.export_adapter(run, out)
  return out / "adapter_model.safetensors"


def test_peft_s_files_are_the_run(place, tmp_path):
  config = json.loads((place / "peft/adapter_config.json").read_text())
  assert (config["modules_to_save"], config["ensure_weight_tying"]) == (["embed_tokens"], True)
  tensors = load_file(place / "peft/adapter_model.safetensors")
  np.testing.assert_array_equal(tensors[HEAD], tensors[EMBEDDING])  # peft requires both
  logits = lambda adapter: maxtext_like.load(place / "base", adapters=[adapter], dtype="float32").logits([[5, 6, 7]])
  assert main(["import", str(place / "peft"), "--out", str(tmp_path / "imported")]) == 0
  assert "modules_to_save: [embed_tokens]" in (tmp_path / "imported/adapter.yml").read_text()
  np.testing.assert_array_equal(logits(tmp_path / "imported"), logits(place / "peft"))
  assert train(place, "on", f"init_from={place}/base", f"lora_from={place}/peft", "steps=1", "learning_rate=1e-9") == 0
  on = load_file(export(place / "on", tmp_path / "on"))[EMBEDDING]
  np.testing.assert_allclose(on, tensors[EMBEDDING], atol=1e-8)


def changed(place: Path, directory: Path, tensors=lambda found: found, **settings: object) -> Path:
  shutil.copytree(place / "peft", directory)
  config = json.loads((directory / "adapter_config.json").read_text()) | settings
  (directory / "adapter_config.json").write_text(json.dumps(config))
  save_file(tensors(load_file(directory / "adapter_model.safetensors")), directory / "adapter_model.safetensors")
  return directory


def test_one_table_that_peft_trained_as_two_is_refused(place, tmp_path):
  load = lambda directory: maxtext_like.load(place / "base", adapters=[directory], dtype="float32").logits([[5, 6, 7]])
  alone = lambda found: {name: x for name, x in found.items() if name != HEAD}
  np.testing.assert_array_equal(load(changed(place, tmp_path / "tied", alone)), load(place / "peft"))
  both = ["embed_tokens", "lm_head"]
  equal = changed(place, tmp_path / "equal", ensure_weight_tying=False, modules_to_save=both)
  np.testing.assert_array_equal(load(equal), load(place / "peft"))
  with pytest.raises(
    UserError, match=r"embed_tokens.weight' was trained alone\n  why: embedding and head of this model are one"
  ):
    load(changed(place, tmp_path / "alone", alone, ensure_weight_tying=False))
  with pytest.raises(UserError, match="was trained next to a head"):
    load(changed(place, tmp_path / "two", lambda found: found | {HEAD: found[HEAD] + 1}, modules_to_save=both))


@pytest.mark.parametrize(
  ("words", "said"),
  [
    (["modules_to_save=[lm_head]"], "the head of this model is its embedding"),
    (["modules_to_save=[norm]"], "modules_to_save: 'norm' is not one of embed_tokens, lm_head"),
    (["lora_modules=[embed_tokens, q_proj]"], "embed_tokens would be trained fully, and lora_modules adapts it too"),
    (["lora_rank=0", "lora_alpha=null"], "modules_to_save = [embed_tokens] has no effect with lora_rank: 0"),
    (["lora_from=PEFT", "lora_rank=0", "lora_alpha=null"], "modules_to_save = [embed_tokens] has no effect with lora_from"),
    (["lora_from=PEFT", "modules_to_save=[]"], "modules_to_save: adapter ('embed_tokens',), this run ()"),
  ],
)
def test_what_cannot_be_is_refused(place, capsys, words, said):
  words = [word.replace("PEFT", str(place / "peft")) for word in words]
  assert train(place, "refused", f"init_from={place}/base", *TABLE, "steps=1", *words) == 2
  assert said in capsys.readouterr().err


def test_two_adapters_with_tables_of_their_own_are_refused(place):
  with pytest.raises(UserError, match="each replaces arrays"):
    _ = maxtext_like.load(place / "base", adapters=[place / "peft", place / "whole"]).params
