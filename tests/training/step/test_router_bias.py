"""DeepSeek's balancing of experts by a bias without a gradient: the sign rule, rows of a stack, and when it is not applied."""

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.config.load import load_config
from maxtext_like.training.step.program import make_program
from maxtext_like.training.step.router_bias import RouterBias
from maxtext_like.training.step.train_step import UNKNOWN


def frozen(bias):
  return {"stack_0": {"layer_0": {"mlp": {"down": None}}}, "stack_1": {"layer_0": {"moe": {"router": {"bias": bias}}}}}


RULE = RouterBias(0.25, (("stack_1", 0, "layer_0"), ("stack_1", 1, "layer_0")))
LOAD = jnp.asarray([[0.5, 0.2, 0.3], [1 / 3, 1 / 3, 1 / 3]])


def test_busy_experts_fall_and_idle_ones_rise_by_the_rate():
  new = RULE(frozen(jnp.ones((2, 3))), LOAD, jnp.asarray(True))
  np.testing.assert_allclose(new["stack_1"]["layer_0"]["moe"]["router"]["bias"], [[0.75, 1.25, 1.25], [1, 1, 1]])
  assert new["stack_0"]["layer_0"]["mlp"]["down"] is None


def test_a_skipped_update_moves_no_bias():
  new = RULE(frozen(jnp.ones((2, 3))), LOAD, jnp.asarray(False))
  np.testing.assert_array_equal(new["stack_1"]["layer_0"]["moe"]["router"]["bias"], np.ones((2, 3)))


def test_it_is_found_where_a_model_has_it_and_nowhere_else():
  rule = make_program(load_config("deepseek3-tiny", ["routed_bias_update_rate=0.5"]).config).step.router_bias
  assert rule is not None
  assert rule.rate == 0.5
  program = make_program(load_config("deepseek3-tiny").config)
  experts = [i for i, layer in enumerate(program.model.decoder.layers) if layer.cfg.ffn.experts]
  assert rule.layers == tuple(program.model.decoder.locate(i) for i in experts)
  assert make_program(load_config("deepseek3-tiny", ["routed_bias_update_rate=0"]).config).step.router_bias is None
  assert make_program(load_config("gemma4-moe-tiny").config).step.router_bias is None
  masked = load_config("deepseek3-tiny", ["routed_bias_update_rate=0.5", "trainable_parameters_mask=['mlp']"])
  assert make_program(masked.config).step.router_bias is None


def test_a_step_of_a_real_model_traces_it():
  program = make_program(load_config("deepseek3-tiny", ["routed_bias_update_rate=0.5"]).config)
  state, metrics = jax.eval_shape(program.step, program.abstract_state, program.abstract_batch, UNKNOWN)
  assert jax.tree.map(lambda x: x.shape, state) == jax.tree.map(lambda x: x.shape, program.abstract_state)
  assert {"moe_load_max", "moe_load_min"} <= set(metrics)
