"""Programs kept for the next start: the same to the last bit, and only where nothing has changed that they follow from."""

import importlib
import io
import json
import logging
import os
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from maxtext_like import own_process
from maxtext_like.cli.main import main
from maxtext_like.config.files import configs_folder
from maxtext_like.training import kept_programs, memory
from maxtext_like.training.kept_programs import KeptPrograms
from maxtext_like.training.program import make_program
from tests.processes import ROOT, environment
from tests.training.small import SMALL, batches, small_config

TINY = sorted(path.stem for path in (configs_folder() / "models").glob("*-tiny.yml"))


@pytest.fixture
def kept(tmp_path, monkeypatch):
  """A process that is the command alone, and its cache: the folder of what is kept."""
  monkeypatch.setattr(own_process, "_began", time.time() + 1)  # of a file that a test writes
  for name in [name for name in os.environ if name.startswith("JAX_") and name != "JAX_PLATFORMS"]:
    monkeypatch.delenv(name)
  jax.config.update("jax_compilation_cache_dir", str(tmp_path))
  jax.config.update("jax_enable_compilation_cache", True)  # a run of a test may have put it off
  return tmp_path / kept_programs.FOLDER


def model_of(*overrides):
  return make_program(small_config("qwen3-tiny", "num_decoder_layers=2", *overrides)).model


def key(*overrides):
  model = model_of(*overrides)
  return kept_programs._key(model, kept_programs._around(model))


def once(model, value):
  """Keeps a value for a model, as a start does."""
  found = KeptPrograms.of(model)
  got = found.value("x", lambda: value)
  found.write()
  return got


def never():
  raise AssertionError("it was kept")


def results(program, kept):
  """All numbers of a step."""
  with kept.compiling():
    init, look, step = (kept.program(name, getattr(program, f"lower_{name}"))() for name in ("init", "look", "step"))
  state = init(np.uint32(1))
  known = look(state["params"], state["opt_state"])["known"]
  after = step(state, program.place(batches(program.global_batch)[0]), known)
  return jax.tree.map(np.asarray, after)


@pytest.mark.parametrize(
  "overrides",
  [
    [],
    pytest.param(["dtype=bfloat16", "lora_rank=2"], marks=pytest.mark.slow),
    pytest.param(
      ["opt_type=adamw", "optimizer_in_backward=true", "mu_dtype=dynamic8", "nu_dtype=dynamic8"], marks=pytest.mark.slow
    ),
  ],
)
def test_programs_are_the_same_to_the_last_bit_and_are_not_lowered_again(overrides, kept, monkeypatch):
  program = make_program(small_config("qwen3-tiny", "num_decoder_layers=2", *overrides))
  first = KeptPrograms.of(program.model)
  saved = first.value("activations", lambda: memory.activation_bytes(program))
  wanted = results(program, first)
  first.write()
  for name in ("lower_init", "lower_look", "lower_step"):
    monkeypatch.setattr(type(program), name, never)
  second = KeptPrograms.of(program.model)
  assert second.value("activations", never) == saved
  jax.tree.map(np.testing.assert_array_equal, results(program, second), wanted)
  second.write()
  assert len(list(kept.glob("*.start"))) == 1
  assert len(list(kept.glob("*.program"))) == 3


@pytest.mark.slow
def test_a_program_of_the_same_text_is_not_compiled_again(kept, monkeypatch):
  program = make_program(small_config("qwen3-tiny", "num_decoder_layers=2"))
  first = KeptPrograms.of(program.model)
  wanted = results(program, first)
  first.write()
  monkeypatch.setattr(kept_programs, "_sources", lambda folder: "others, which lower the same programs")
  monkeypatch.setattr(KeptPrograms, "_compiled", never)
  again = KeptPrograms.of(program.model)
  jax.tree.map(np.testing.assert_array_equal, results(program, again), wanted)
  again.write()
  assert (len(list(kept.glob("*.start"))), len(list(kept.glob("*.program")))) == (2, 3)


def test_jax_keeps_the_other_programs(kept):
  assert jax.config.values["jax_enable_compilation_cache"]
  with KeptPrograms.of(model_of()).compiling():
    assert not jax.config.values["jax_enable_compilation_cache"]
  assert jax.config.values["jax_enable_compilation_cache"]


def test_what_xla_cannot_give_away_is_told(kept, caplog, monkeypatch):
  def fail(made):
    raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: a sort")

  monkeypatch.setattr(kept_programs.serialize_executable, "serialize", fail)
  found = KeptPrograms.of(model_of())
  with found.compiling(), caplog.at_level(logging.WARNING):
    assert found.program("x", lambda: jax.jit(lambda x: x + 1).lower(1.0))()(1.0) == 2
  assert "not kept for the next start: UNIMPLEMENTED: a sort" in caplog.text


@pytest.mark.parametrize("name", TINY)
def test_every_model_has_a_key(name):
  assert len(kept_programs._key(make_program(small_config(name)).model, "")) == 64


def test_places_are_not_in_the_key_and_all_else_is(monkeypatch):
  usual = key()
  assert key("output_dir=elsewhere", "run_name=other", "compilation_cache_dir=null") == usual
  for word in ("steps=7", "learning_rate=0.06", "seed=3", "weight_dtype=bfloat16", "numerics_every=5"):
    assert key(word) != usual, word
  monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"] + " --xla_cpu_enable_fast_math=false")
  assert key() != usual
  monkeypatch.undo()
  monkeypatch.setattr(kept_programs, "_processor", lambda: "another")
  assert key() != usual
  monkeypatch.undo()
  monkeypatch.setattr(kept_programs, "_sources", lambda folder: "others")
  assert key() != usual
  monkeypatch.undo()
  with jax.default_matmul_precision("float32"):
    assert key() != usual
  assert key() == usual


def test_every_source_file_is_in_the_key(tmp_path):
  shutil.copytree(kept_programs._PACKAGE, folder := tmp_path / "package", ignore=shutil.ignore_patterns("__pycache__"))
  usual = kept_programs._sources(str(folder))
  for name in ("layers/mlp.py", "training/step.py", "models/gemma4/model.py"):
    file = folder / name
    assert file.is_file()
    text, times = file.read_text(), file.stat()
    file.write_text(text.replace("a", "b", 1))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert kept_programs._sources(str(folder)) != usual, name
    file.write_text(text)
  assert kept_programs._sources(str(folder)) == usual


def test_what_is_no_file_or_cannot_be_read_ends_no_start(kept, caplog, monkeypatch, tmp_path):
  """A buffer that Emacs has not saved, or a file that goes as it is looked at."""
  (tmp_path / "step.py").write_text("x = 1")
  usual = kept_programs._sources(str(tmp_path))
  (tmp_path / ".#step.py").symlink_to("user@host.123:456")
  assert kept_programs._sources(str(tmp_path)) == usual
  monkeypatch.setattr(kept_programs, "_PACKAGE", str(tmp_path / "gone"))
  with caplog.at_level(logging.WARNING):
    assert once(model_of(), 1) == 1
  assert "not kept for the next start" in caplog.text
  assert not kept.exists()


def test_the_program_does_not_follow_from_its_places():
  texts = {
    make_program(small_config("qwen3-tiny", "num_decoder_layers=2", *words)).lower_step().as_text()
    for words in ([], ["output_dir=elsewhere", "run_name=other", "compilation_cache_dir=null"])
  }
  assert len(texts) == 1


def test_a_changed_file_of_others_finds_nothing(kept, tmp_path, monkeypatch):
  (file := tmp_path / "others.py").write_text("x = 1")
  monkeypatch.setitem(sys.modules, "others", types.ModuleType("others"))
  monkeypatch.setattr(sys.modules["others"], "__file__", str(file), raising=False)
  model = model_of()
  assert once(model, 1) == 1
  assert once(model, 2) == 1
  file.write_text("x = 22")
  assert once(model, 3) == 3
  file.unlink()
  assert once(model, 4) == 4


def test_code_that_is_found_elsewhere_finds_nothing(kept, tmp_path, monkeypatch):
  """Another environment with the same cache, a patched package before the installed one: no file of the first has changed."""
  for name in ("one", "two"):
    (tmp_path / name).mkdir()
  monkeypatch.setattr(sys, "path", [str(tmp_path / "two"), str(tmp_path / "one"), *sys.path])
  (tmp_path / "one" / "imported_first.py").write_text("x = 1")
  importlib.import_module("imported_first")
  model = model_of()
  assert once(model, 1) == 1
  del sys.modules["imported_first"]
  assert once(model, 2) == 1
  (tmp_path / "two" / "imported_first.py").write_text("x = 2")
  importlib.invalidate_caches()
  assert once(model, 3) == 3
  with monkeypatch.context() as other:
    other.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert once(model, 4) == 4
  assert once(model, 5) == 3


def test_flags_of_a_file_are_in_the_key(monkeypatch, tmp_path):
  """XLA takes an ``XLA_FLAGS`` that does not begin with a dash for the name of a file."""
  model = model_of()
  (file := tmp_path / "flags.txt").write_text("--xla_cpu_enable_fast_math=false")
  monkeypatch.setenv("XLA_FLAGS", str(file))
  usual = kept_programs._around(model)
  file.write_text("--xla_cpu_enable_fast_math=true")
  assert kept_programs._around(model) != usual
  file.write_text("--xla_cpu_enable_fast_math=false")
  assert kept_programs._around(model) == usual


def test_an_archive_that_code_was_loaded_from_finds_nothing_once_it_has_changed(kept, tmp_path, monkeypatch):
  (archive := tmp_path / "packed.zip").write_bytes(b"one")
  monkeypatch.setitem(sys.modules, "packed", types.ModuleType("packed"))
  monkeypatch.setattr(sys.modules["packed"], "__file__", str(archive / "packed" / "module.py"), raising=False)
  model = model_of()
  assert once(model, 1) == 1
  assert once(model, 2) == 1
  archive.write_bytes(b"other")
  assert once(model, 3) == 3


def test_code_that_changed_while_it_was_loaded_is_not_kept(kept, monkeypatch):
  monkeypatch.setattr(own_process, "_began", 1.0)
  assert once(model_of(), 1) == 1
  assert not kept.exists()


def test_code_that_came_in_the_place_of_what_was_loaded_is_not_kept(kept, tmp_path, monkeypatch):
  """By rsync or mv, which bring along the time of another file."""
  time.sleep(0.05)  # a file system's clock is coarse
  monkeypatch.setattr(own_process, "_began", time.time())
  time.sleep(0.05)
  (file := tmp_path / "others.py").write_text("x = 1")
  os.utime(file, (1, 1))
  monkeypatch.setitem(sys.modules, "others", types.ModuleType("others"))
  monkeypatch.setattr(sys.modules["others"], "__file__", str(file), raising=False)
  assert once(model_of(), 1) == 1
  assert not kept.exists()


def test_nothing_is_kept_where_others_may_have_a_hand_in_it(kept, monkeypatch):
  model = model_of()
  monkeypatch.setenv("JAX_LOG_COMPILES", "1")
  once(model, 1)
  monkeypatch.delenv("JAX_LOG_COMPILES")
  monkeypatch.setattr(own_process, "_began", None)
  once(model, 2)
  monkeypatch.undo()
  assert not kept.exists()


def test_a_damaged_file_is_told_and_made_again(kept, caplog):
  model = model_of()
  once(model, 1)
  (file,) = kept.glob("*.start")
  content = file.read_bytes()
  file.write_bytes(content[: len(content) // 2] + bytes([content[len(content) // 2] ^ 1]) + content[len(content) // 2 + 1 :])
  with caplog.at_level(logging.WARNING):
    assert once(model, 2) == 2
  assert "the programs are made again" in caplog.text
  assert once(model, 3) == 2


def test_classes_that_have_moved_are_told_and_made_again(kept, caplog, monkeypatch):
  """As those of an optimizer's state do from one version of optax to the next."""
  monkeypatch.setitem(sys.modules, "moving", module := types.ModuleType("moving"))
  moved = type("Moved", (), {"__module__": "moving"})
  monkeypatch.setattr(module, "Moved", moved, raising=False)
  model = model_of()
  once(model, moved())
  monkeypatch.delattr(module, "Moved")
  with caplog.at_level(logging.WARNING):
    assert once(model, 2) == 2
  assert "the programs are made again" in caplog.text
  assert once(model, 3) == 2


def test_a_full_or_closed_folder_is_told(kept, caplog):
  kept.parent.joinpath(kept_programs.FOLDER).write_text("a file")
  with caplog.at_level(logging.WARNING):
    assert once(model_of(), 1) == 1
  assert "not kept for the next start" in caplog.text


def test_the_oldest_go(kept, monkeypatch):
  monkeypatch.setattr(kept_programs, "KEPT", 2)
  models = [model_of(f"seed={seed}") for seed in range(3)]
  for seed, model in enumerate(models):
    once(model, seed)
  assert [once(model, "gone") for model in reversed(models)] == [2, 1, "gone"]


def test_what_another_user_may_not_remove_stays_and_nothing_is_told(kept, caplog, monkeypatch):
  """In a folder that all may write to, where each removes their own files alone."""
  monkeypatch.setattr(kept_programs, "KEPT", 1)
  models = [model_of(f"seed={seed}") for seed in range(3)]
  once(models[0], 0)
  (others,) = kept.iterdir()
  usual = Path.unlink

  def unlink(path, **how):
    if path == others:
      raise PermissionError(1, "Operation not permitted")
    usual(path, **how)

  monkeypatch.setattr(Path, "unlink", unlink)
  with caplog.at_level(logging.WARNING):
    once(models[1], 1)
    os.utime(others, (0, 0))
    once(models[2], 2)
  assert not caplog.text
  assert len(list(kept.iterdir())) == 2


def test_a_kind_that_is_not_known_is_told(kept, caplog, monkeypatch):
  with pytest.raises(TypeError, match="a object"):
    kept_programs._plain({"x": (object(),)})
  model = model_of()
  monkeypatch.setattr(kept_programs, "_key", lambda model, around: (_ for _ in ()).throw(TypeError("a thing")))
  with caplog.at_level(logging.WARNING):
    assert once(model, 1) == 1
  assert "not kept for the next start: a thing" in caplog.text


@pytest.mark.parametrize(
  ("text", "told"),
  [
    ("", ""),
    ("model name : a\nflags : b\nbogomips : 1", "model name : a\nflags : b\n"),
    ("flags : b\n\nflags : b\n\n", "flags : b\n"),
  ],
)
def test_a_processor_that_is_told_in_other_words_ends_the_reading_too(text, told, monkeypatch):
  """A sandbox may show none, and not every system has a blank line."""

  class Once(io.StringIO):
    ended = False

    def readline(self, *args):
      assert not self.ended, "it reads behind the end"
      line = super().readline(*args)
      self.ended = not line
      return line

  monkeypatch.setattr("builtins.open", lambda *_, **__: Once(text))
  assert kept_programs._processor() == told


def test_only_a_command_that_has_not_imported_jax_is_alone(monkeypatch):
  monkeypatch.setattr(own_process, "_began", None)
  own_process.begin()
  assert own_process.began() is None
  monkeypatch.delitem(sys.modules, "jax")
  own_process.begin()
  assert own_process.began() == pytest.approx(time.time(), abs=60)


@pytest.mark.slow
def test_a_run_by_epochs_is_estimated_once(kept, tmp_path, monkeypatch):
  """Before its steps, which are constants of its programs, are counted: that is a start of its own."""
  (data := tmp_path / "texts.jsonl").write_text('{"text": "a few words and a few more of them"}\n' * 20)
  words = ["train", "qwen3-tiny", *SMALL, "num_decoder_layers=2", "dataset=jsonl", f"dataset_path={data}", "epochs=1"]
  words += [f"compilation_cache_dir={kept.parent}", f"output_dir={tmp_path}"]
  assert main([*words, "run_name=first"]) == 0
  monkeypatch.setattr(memory, "activation_bytes", never)
  assert main([*words, "run_name=second"]) == 0
  assert len(list(kept.glob("*.start"))) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("model", "devices"), [("qwen3-tiny", 1), ("qwen3-tiny", 4), ("qwen3-moe-tiny", 1)])
def test_the_command_starts_again_from_what_it_kept(model, devices, tmp_path):
  words = [model, *SMALL, "steps=3", "num_decoder_layers=2", "dataset=synthetic", "packing=true"]
  words += [f"compilation_cache_dir={tmp_path}/cache", f"output_dir={tmp_path}", f"ici_fsdp_parallelism={devices}"]
  variables = {k: v for k, v in environment(devices).items() if not k.startswith("JAX_") or k == "JAX_PLATFORMS"}
  rows, contents = [], []
  for name in ("first", "second"):
    command = [sys.executable, str(Path(ROOT) / "train.py"), *words, f"run_name={name}"]
    done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert not {"kept", "again"} & set(done.stderr.split())
    lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
    rows.append([(row["loss"], row["grad_norm"], row["param_norm"]) for row in lines])
    files = sorted((tmp_path / "cache" / kept_programs.FOLDER).iterdir())
    assert len(files) == 4
    contents.append([(file.name, file.stat().st_ino) for file in files])
  assert rows[0] == rows[1]
  assert contents[0] == contents[1]
