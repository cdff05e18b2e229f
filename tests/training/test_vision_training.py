"""Training on images: the golden loss in the train step, complete runs on text and images, and statistics of the tower that
stay unchanged."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import maxtext_like
from maxtext_like.checkpoint.huggingface.inputs import make_batch
from maxtext_like.checkpoint.huggingface.model_file import load_checkpoint_config
from maxtext_like.checkpoint.huggingface.tensor_file import SafetensorsFile
from maxtext_like.checkpoint.huggingface.weights import load_hugging_face
from maxtext_like.checkpoint.store.manager import CheckpointManager
from maxtext_like.cli.main import main
from maxtext_like.config.load import load_config
from maxtext_like.config.schema import Config
from maxtext_like.errors import UserError
from maxtext_like.training.run.banner import tower_described
from maxtext_like.training.run.batches import first_batch
from maxtext_like.training.step.program import TrainProgram, make_program
from maxtext_like.training.step.train_step import UNKNOWN
from tests.processes import ROOT, environment
from tests.tiers import nightly, slow

GOLDEN = ROOT / "tests" / "golden"
SMALL = ["num_decoder_layers=2", "inhomogeneous_layer_cycle_interval=1", "emb_dim=32", "mlp_dim=48"]
SMALL += ["intermediate_size_for_vit=32"]
SMALL += ["max_target_length=40", "per_device_batch_size=4", "lr_schedule_type=constant"]
SMALL += ["use_multimodal=true", "dataset=jsonl", "warmup_steps_fraction=0", "learning_rate=1e-2", "enable_tensorboard=false"]


WEIGHTS = ("q", "k", "v", "o", "gate", "up", "down")  # linear maps of a tower's layers
QUICK = {"xla_backend_optimization_level": 0}  # most of the time of these tests is compilation


def golden_program(case: str, *words: str) -> TrainProgram:
  settings = ["use_multimodal=true", "dtype=float32", "matmul_precision=highest", "max_images_per_row=2", *words]
  _, loaded = load_checkpoint_config(GOLDEN / case / "checkpoint", settings, length=34)
  return make_program(loaded.config)


def golden_batch(case: str, config: Config) -> dict[str, np.ndarray]:
  """Return the inputs of a case with its images grouped by row: [B, M, ...]."""
  with np.load(GOLDEN / case / "inputs.npz") as file:
    arrays = dict(file)
  batch = make_batch(arrays, case, vocab_size=config.model.vocab_size, vision=config.vision).batch
  is_image = np.pad(batch["tokens"] == config.vision.image_token_id, ((0, 0), (1, 0)))
  counts = (np.diff(is_image.astype(int), axis=1) == 1).sum(axis=1)
  assert counts.sum() == len(batch["pixel_values"])
  for name, empty in (("pixel_values", 0), ("image_position_ids", -1)):
    if name in batch:
      images = iter(batch[name])
      rows = np.full((len(counts), config.vision.max_images_per_row, *batch[name].shape[1:]), empty, batch[name].dtype)
      for row, count in zip(rows, counts, strict=True):
        for place in range(count):
          row[place] = next(images)
      batch[name] = rows
  return batch


@pytest.mark.slow
def test_the_step_on_images_by_row_gives_the_golden_loss_and_gradient(tmp_path: Path):
  """A step with two microbatches of one row each and full rematerialization has the golden loss and gradient norm. In the
  checkpoint after it, the tower's statistics are those of the file bit for bit.

  tests/models/test_golden_vision.py compares the gradients of every model with images.
  """
  case = "gemma4_vision_large"
  words = ["per_device_batch_size=2", "gradient_accumulation_steps=2", "remat_policy=full", "weight_dtype=float32"]
  program = golden_program(case, *words)
  # The sides of golden images are not multiples of a pooled square of patches, as those of a run are. The step accepts them
  # too.
  batch = {name: jax.numpy.asarray(array) for name, array in golden_batch(case, program.config).items()}
  params = load_hugging_face(GOLDEN / case / "checkpoint", program.model.decoder)
  step = jax.jit(dataclasses.replace(program.step, checked=True), compiler_options=QUICK)
  state, metrics = step(program._around(params, jax.numpy.uint32(0)), batch, UNKNOWN)
  with np.load(GOLDEN / case / "outputs.npz") as expected:
    np.testing.assert_allclose(metrics["loss"], expected["fp32.base.loss"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], expected["fp32.base.grad_global_norm"], rtol=1e-3)
  assert not metrics["skipped"]
  manager = CheckpointManager(tmp_path, config=program.config, asynchronous=False)
  assert manager.save_and_wait(1, state)
  like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
  restored = manager.restore(like)
  manager.close()
  assert restored is not None
  jax.tree.map(np.testing.assert_array_equal, restored.state["params"], state["params"])
  file = SafetensorsFile(GOLDEN / case / "checkpoint" / "model.safetensors")
  for name in ("std_bias", "std_scale"):
    stored = restored.state["params"]["vision"][name]
    assert stored.dtype == np.float32
    np.testing.assert_array_equal(stored, file.tensor(f"model.vision_tower.{name}").astype(np.float32))


@pytest.mark.parametrize("case", ["gemma4_vision_large", "gemma4_vision_small"])
def test_statistics_and_bounds_are_float32_whatever_the_weights_are(case: str):
  program = golden_program(case, "weight_dtype=bfloat16")
  params = load_hugging_face(GOLDEN / case / "checkpoint", program.model.decoder)["vision"]
  leaves = jax.tree_util.tree_leaves_with_path(params)
  buffers = [(path, x) for path, x in leaves if "std" in jax.tree_util.keystr(path) or "clip" in jax.tree_util.keystr(path)]
  assert len(buffers) == (2 if case == "gemma4_vision_large" else 7 * 4)
  assert all(x.dtype == np.float32 for _, x in buffers)
  assert any(x.dtype == jax.numpy.bfloat16 for _, x in leaves)
  trained, frozen = program.selection.split(program.spec)
  assert len(jax.tree.leaves(frozen["vision"], is_leaf=lambda x: hasattr(x, "trainable"))) == len(buffers)
  assert trained["vision"]["patch"] is not None


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """Records whose last word can only be known from the image. A quarter of the records has no image."""
  folder = tmp_path_factory.mktemp("pictures")
  random, rows = np.random.default_rng(0), []
  for i in range(32):
    if i % 4 == 3:
      rows.append({"text": "No <image> here."})
      continue
    shade, size = i % 2, [(32, 32), (20, 60), (70, 15)][i % 3]
    levels = np.clip((60, 200)[shade] + random.normal(0, 10, (*size, 3)), 0, 255)
    Image.fromarray(levels.astype(np.uint8)).save(folder / f"{i}.png")
    rows.append({"text": f"<image> {'ab'[shade]}", "images": [f"{i}.png"]})
  (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  return folder / "data.jsonl"


def metrics_of(run: Path) -> list[dict]:
  return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_on_images_and_text_in_float16(pictures: Path, tmp_path: Path):
  before = {name: getattr(jax.config, name) for name in ("jax_compilation_cache_dir", "jax_enable_compilation_cache")}
  words = [*SMALL, f"dataset_path={pictures}", f"output_dir={tmp_path}", "run_name=r", "dtype=float16"]
  words += [f"compilation_cache_dir={tmp_path}/cache"]
  try:
    assert main(["train", "gemma4-tiny", *words, "steps=12"]) == 0
  finally:
    for name, value in before.items():
      jax.config.update(name, value)
  rows = metrics_of(tmp_path / "r")
  assert [row["step"] for row in rows] == list(range(1, 13))
  assert all(np.isfinite([row["loss"], row["grad_norm"], row["param_norm"]]).all() for row in rows)
  assert not any(row["skipped"] for row in rows)
  assert rows[-1]["loss"] < rows[0]["loss"] / 2


E2B = ["num_kv_shared_layers=0", "use_double_wide_mlp=false"]
LORA = ["lora_rank=2", "learning_rate=0.1"]
TOWERS = {
  "trained": ["vision_tower=trained"],
  "projector": ["vision_tower=projector"],
  "frozen": ["vision_tower=frozen"],
  "frozen below an adapter": ["vision_tower=frozen", *LORA],
  "projector beside an adapter": ["vision_tower=projector", *LORA],
  "trained beside an adapter": ["vision_tower=trained", *LORA],
  "adapted": ["vision_tower=adapted", *LORA],
  "adapted over nf4": ["vision_tower=adapted", "lora_modules=[q_proj, v_proj]", "base_weights=nf4", *LORA],
}


def tower_program(model: str, name: str, *words: str) -> TrainProgram:
  settings = [*SMALL, *(E2B if "e2b" in model else []), "per_device_batch_size=2", "dtype=float16", *TOWERS[name], *words]
  return make_program(load_config(model, settings).config)


def steps_of(program: TrainProgram, batch: dict, count: int) -> tuple[dict, dict]:
  """Return the parameters before and after this many steps on the same batch."""
  state = program.lower_init().compile(compiler_options=QUICK)(np.uint32(0))
  # The step is compiled once, as in a run. jax.jit would compile it again, because the arrays of the second step have another
  # sharding than those of the first.
  step, known = program.lower_step(checked=True).compile(compiler_options=QUICK), UNKNOWN
  before = jax.tree.map(np.array, state["params"])  # a copy, because the step reuses the memory of the state
  for _ in range(count):
    state, metrics = step(state, batch, known)
    assert np.isfinite(metrics["loss"])
    assert not metrics["skipped"]
    known = metrics["magnitude_bound"]
  return before, jax.tree.map(np.asarray, state["params"])


def test_what_the_start_says_of_the_tower():
  said = {name: tower_described(tower_program("gemma3-tiny", name, "dataset_path=x")) for name in TOWERS}
  assert said["trained"] == said["trained beside an adapter"] == "trained: 32,608 parameters"
  assert said["projector"] == said["projector beside an adapter"] == "1,584 of 32,608 parameters trained: projector"
  assert said["frozen"] == said["frozen below an adapter"] == "frozen: 32,608 parameters"
  assert said["adapted"] == (
    "frozen: 32,608 parameters; adapted with 2,176 more in 2 layers: "
    "attention.k, attention.o, attention.q, attention.v, mlp.down, mlp.up"
  )
  # Without vision_tower in the configuration.
  unsaid = lambda *words: tower_described(make_program(load_config("gemma3-tiny", [*SMALL, "dataset_path=x", *words]).config))
  assert unsaid() == said["trained"]
  assert unsaid(*LORA) == said["frozen"]
  assert unsaid(*LORA, "lora_modules=[k_proj, vision.projector]").endswith("in 2 layers: attention.k, projector.kernel")
  assert unsaid(*LORA, "lora_modules=[k_proj]", "vision_tower=frozen") == said["frozen"]


@pytest.mark.parametrize(
  ("words", "said"),
  [
    (["vision_tower=adapted", "lora_modules=[embed_tokens]"], "vision_tower = adapted, but lora_modules matches no weight"),
    (
      ["vision_tower=frozen", "lora_modules=[q_proj, vision]"],
      "'vision' matches no weight of this model outside its vision tower",
    ),
    (["vision_tower=projector", "lora_modules=[vision]"], "vision tower, which is frozen except for its projector"),
  ],
)
def test_modules_that_do_not_go_with_the_tower(words: list[str], said: str):
  with pytest.raises(UserError, match=said):
    make_program(load_config("gemma3-tiny", [*SMALL, "dataset_path=x", *LORA, *words]).config)


@pytest.mark.parametrize(
  ("model", "name"),
  [
    nightly("gemma3-tiny", "trained"),
    nightly("gemma3-tiny", "projector"),
    nightly("gemma3-tiny", "frozen below an adapter"),
    slow("gemma3-tiny", "projector beside an adapter"),
    slow("gemma3-tiny", "adapted over nf4"),
    nightly("gemma4-e2b-tiny", "adapted"),
  ],
)
def test_what_is_trained_of_the_tower_on_images_and_text_in_float16(model: str, name: str, pictures: Path):
  program = tower_program(model, name, f"dataset_path={pictures}", "packing=false", "eval_fraction=0", "max_images_per_row=1")
  program, batch = first_batch(program, program.config.checkpoint, pictures.parent / "none")
  shown = [bool(np.any(batch["pixel_values"][row])) for row in range(2)]
  if all(shown):  # make the second row text only, whatever the order of the records is
    batch["pixel_values"] = batch["pixel_values"].at[1].set(0)
    batch["tokens"] = jnp.where(jnp.arange(2)[:, None] == 1, 5, batch["tokens"])
  before, after = steps_of(program, batch, 3)
  changed = jax.tree_util.tree_map_with_path(
    lambda path, a, b: (jax.tree_util.keystr(path, simple=True, separator="."), not np.array_equal(a, b)), before, after
  )
  moved = {name for name, is_other in jax.tree.leaves(changed, is_leaf=lambda x: isinstance(x, tuple)) if is_other}
  tower = {name for name in moved if name.startswith("vision.")}
  trainable = {
    jax.tree_util.keystr(path, simple=True, separator=".")
    for path, p in jax.tree_util.tree_leaves_with_path({"vision": program.model.decoder.params()["vision"]})
    if p.trainable
  }
  projector = {name for name in trainable if name.startswith("vision.projector")}
  assert tower == {"trained": trainable, "projector": projector}.get(name, set())  # exactly these arrays
  whole = {name.removeprefix("adapter.").removesuffix(".whole") for name in moved if name.endswith(".whole")}
  moved = {name for name in moved if not name.endswith(".whole")}
  assert whole == {"trained beside an adapter": trainable, "projector beside an adapter": projector}.get(name, set())
  assert any(name.startswith("stack_0.") for name in moved) == (program.adapter is None)
  factors = {name.removeprefix("adapter.") for name in moved if name.startswith("adapter.")}
  assert bool(factors) == (program.adapter is not None)
  in_tower = {name.rpartition(".")[0] for name in factors if name.startswith("vision.")}
  layers = {name for name in trainable if name.startswith("vision.layers.") and name.rpartition(".")[2] in WEIGHTS}
  few = {name for name in layers if name.endswith((".q", ".v"))}
  assert in_tower == {"adapted": layers, "adapted over nf4": few}.get(name, set())


@pytest.mark.nightly  # tests/data/image_text/test_multimodal.py: rows of each process; test_parallelism.py: two processes
def test_two_processes_give_the_losses_of_one(pictures: Path, tmp_path: Path):
  """Each process decodes only the images of its own rows. Losses and gradient norms are those of one process."""
  for devices in (1, 2):
    words = [*SMALL, f"dataset_path={pictures}", f"output_dir={tmp_path}", f"run_name={devices}", "steps=3", "dtype=float32"]
    words += [f"per_device_batch_size={4 // devices}", "opt_type=sgd", "enable_checkpointing=false"]
    words += ["--processes", "2", "--devices-per-process", "1"] if devices == 2 else []
    command = [sys.executable, "-m", "maxtext_like", "train", "gemma4-tiny", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
  one, two = ([(r["loss"], r["grad_norm"]) for r in metrics_of(tmp_path / str(n))] for n in (1, 2))
  np.testing.assert_allclose(one, two, rtol=1e-5)


@pytest.mark.parametrize(
  ("case", "tower"),
  [
    nightly("gemma3_vision", "projector"),
    nightly("gemma4_vision_small", "trained"),
  ],
)
def test_what_is_trained_whole_beside_an_adapter_travels_with_it(case: str, tower: str, pictures: Path, tmp_path: Path):
  """A projector or tower that is trained completely in addition to an adapter is part of its files. The merged run equals the
  base with the adapter of the run, of peft's files and of their import. A stopped run resumes bit for bit, and new runs start
  with the adapter of the run or of peft's files."""
  shutil.copytree(GOLDEN / case / "checkpoint", tmp_path / "hf")
  words_of(tmp_path / "hf")
  maxtext_like.import_checkpoint(tmp_path / "hf", tmp_path / "base")
  words = [f"dataset_path={pictures}", "dataset=jsonl", f"tokenizer={tmp_path}/hf", "max_target_length=64"]
  words += ["use_multimodal=true", "dtype=float32", f"init_from={tmp_path}/base", "enable_tensorboard=false"]
  words += ["per_device_batch_size=2", "lr_schedule_type=constant", "warmup_steps_fraction=0", "learning_rate=0.03"]
  words += [f"output_dir={tmp_path}", "eval_fraction=0", f"compilation_cache_dir={tmp_path}/cache"]
  lora = ["lora_rank=2", "lora_modules=[q_proj]", f"vision_tower={tower}", "checkpoint_interval=1"]

  def train(name: str, *more: str) -> list[dict]:
    assert main(["train", str(tmp_path / "base/model.yml"), *words, *more, f"run_name={name}"]) == 0
    return metrics_of(tmp_path / name)

  whole = train("run", *lora, "steps=3")
  run = tmp_path / "run"
  maxtext_like.export_adapter(run, tmp_path / "peft")
  said = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
  assert ("vision_tower" in said["modules_to_save"]) == (tower == "trained")
  maxtext_like.import_checkpoint(tmp_path / "peft", tmp_path / "imported", "use_multimodal=true", f"init_from={tmp_path}/base")
  merged = maxtext_like.load(run).params
  moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), maxtext_like.load(tmp_path / "base").params, merged)["vision"]
  assert any(jax.tree.leaves(moved["projector"]))
  assert any(jax.tree.leaves(moved | {"projector": {}})) == (tower == "trained")
  for adapter in (run, tmp_path / "peft", tmp_path / "imported"):
    added = maxtext_like.load(tmp_path / "base", adapters=adapter).params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), added, merged)
  with pytest.raises(UserError, match="each replaces arrays, such as a vision tower"):
    _ = maxtext_like.load(tmp_path / "base", adapters=[run, tmp_path / "peft"]).params
  if tower == "trained":  # the rest is the same for both
    return
  train("parts", *lora, "steps=1", "lr_schedule_steps=3")
  assert [row["loss"] for row in train("parts", *lora, "steps=3", "lr_schedule_steps=3")] == [row["loss"] for row in whole]
  found = [train(f"from-{name}", f"lora_from={tmp_path}/{name}", "steps=1")[0]["loss"] for name in ("run", "peft")]
  assert found[0] == pytest.approx(found[1], rel=1e-6)
  assert found[0] < whole[0]["loss"]


def words_of(folder: Path) -> None:
  """Write a tokenizer with two words, for the small vocabularies of the golden models."""
  from tokenizers import Tokenizer, models, pre_tokenizers

  names = ["<pad>", "<eos>", "<bos>", "<unk>", "a", "b"]
  made = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
  made.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
  made.save(str(folder / "tokenizer.json"))
