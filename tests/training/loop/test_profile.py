"""profile_steps: a trace of exactly these steps. A trace that fails does not end the run."""

import gzip
import json
import sys

import jax
import jax.numpy as jnp
import pytest

from maxtext_like.config.load import load_config
from maxtext_like.training.loop.profile import Profile
from tests.analysis.test_failed_step import toy_loop
from tests.training.toy import toy_config


def test_the_loop_traces_the_steps_between_idle_moments(tmp_path):
  seen = []

  class Recorder(Profile):
    def start(self):
      assert loop._launched is None
      seen.append(("start", int(loop.state["step"])))
      self._done = self._tracing = True

    def stop(self):
      if self._tracing:
        assert loop._launched is None
        seen.append(("stop", int(loop.state["step"])))
        self._tracing = False

  loop = toy_loop(toy_config("opt_type=sgd", "steps=7", "finite_check_steps=0"), tmp_path)
  loop.profile = Recorder("3-5", tmp_path, lambda _: None)
  loop.run(0)
  assert seen == [("start", 2), ("stop", 5)]


def test_a_trace_is_written_where_it_is_told(tmp_path):
  said = []
  profile = Profile("4", tmp_path, said.append)
  assert [profile.starts(step) for step in (3, 4, 5)] == [False, True, False]
  profile.start()
  assert (profile.starts(4), profile.ends(3), profile.ends(4)) == (False, False, True)
  jax.block_until_ready(jnp.ones((8, 8)) @ jnp.ones((8, 8)))
  profile.stop()
  profile.stop()
  (line,) = said
  assert line.startswith(f"profile of steps 4 to 4 in {tmp_path}/profile, written in ")
  assert f"xprof --logdir {tmp_path}/profile" in line
  (trace,) = tmp_path.glob("profile/plugins/profile/*/*.trace.json.gz")
  assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
  assert list(tmp_path.glob("profile/plugins/profile/*/*.xplane.pb"))


def test_what_fails_is_told(tmp_path, monkeypatch):
  said = []
  profile = Profile("2-3", tmp_path, said.append)

  def fails(*_):
    raise RuntimeError("CUPTI is busy")

  monkeypatch.setattr(jax.profiler, "start_trace", fails)
  profile.start()
  assert not profile.ends(3)
  profile.stop()
  assert said == ["no profile: CUPTI is busy"]
  late = Profile("2-3", tmp_path, said.append)
  late.note(1)
  late.note(2)
  assert said[1:] == ["note    profile_steps=2-3: step 2 is already finished, nothing is traced"]


@pytest.mark.slow
def test_a_real_run(tmp_path, capsys):
  from maxtext_like.analysis.failed_step import FailedStep
  from maxtext_like.training.run.run import train

  words = ["num_decoder_layers=2", "inhomogeneous_layer_cycle_interval=2", "emb_dim=16", "mlp_dim=24", "head_dim=8", "steps=4"]
  words += ["max_target_length=16", "dataset_documents_max=40", "enable_checkpointing=false", "profile_steps=2-3"]
  words += [f"output_dir={tmp_path}", "run_name=p", "enable_tensorboard=false"]
  train(load_config("gemma3-tiny", words), FailedStep, sys.stdout)
  assert f"profile of steps 2 to 3 in {tmp_path}/p/profile" in capsys.readouterr().out
  assert list(tmp_path.glob("p/profile/plugins/profile/*/*.xplane.pb"))
