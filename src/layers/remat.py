"""Rematerialization: the values of a layer that are saved for the backward pass, and whether they are kept on the host."""

from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name

from maxtext_like.layers.precision import PRODUCT

RematPolicy = Literal["none", "minimal", "save_mlp", "save_outputs", "save_attention", "full"]


RematOffload = Literal["none", "layer_inputs", "kept", "all"]
LAYER_INPUT = "layer_input"  # checkpoint name of the values that a layer reads from the carry
NAMES: dict[RematPolicy, tuple[str, ...]] = {
  "minimal": (PRODUCT,),
  "full": (),
  "save_attention": ("attention",),
  "save_outputs": ("output",),
  "save_mlp": ("output", "mlp"),
}
"""The checkpoint names that a policy saves. "minimal" saves all other products without batch axes too."""


def remat(function, policy: RematPolicy, *, isolated: bool, offload: RematOffload = "none"):
  """Apply ``jax.checkpoint`` with one of the named policies.

  If a layer is the complete body of a scan, XLA cannot merge its recomputation with the forward pass. In other cases it must be
  prevented from that, and from recomputing several layers at once. The prevention costs a copy of each saved array.

  Args:
    function: (p, carry, ctx) -> any result. Without offloading it may be any function.
    policy: see ``NAMES``.
    isolated: the function is the complete body of a scan, or the caller isolates it from other computations.
    offload: saved values that are kept in host memory until the backward pass needs them: the arrays of the carry
      ("layer_inputs"), the values that the policy saves ("kept"), "all" or "none".

  Raises:
    ValueError: offload with the policy "none", which names no saved values.
  """
  # No checkpoint: all values are saved.
  if policy == "none":
    if offload != "none":
      raise ValueError(
        f"remat_offload={offload} has no effect with remat_policy=none, which names no saved values\n  fix: choose another "
        "remat_policy, or set remat_offload=none"
      )
    return function
  # Choose what is saved and where, and wrap the function.
  saved = _kept_on_device(policy) if offload == "none" else _kept_on_host(policy, offload)
  if offload in ("layer_inputs", "all"):
    function = _naming_its_carry(function)
  return jax.checkpoint(function, policy=saved, prevent_cse=not isolated)


def keeps(policy: RematPolicy, name: str) -> bool:
  """True if a policy saves the products with this checkpoint name."""
  return policy in ("none", "minimal") or name in NAMES[policy]


def offload_under(policy: RematPolicy, offload: RematOffload) -> RematOffload:
  """Return the offload setting that has an effect under another policy: none with "none", only layer inputs with "full"."""
  if policy == "none" or offload == "none":
    return "none"
  return "layer_inputs" if policy == "full" else offload


def _kept_on_device(policy: RematPolicy) -> Any:
  policies = jax.checkpoint_policies
  # "full" saves nothing, other policies save values by name, and "minimal" products without batch axes too.
  if policy == "full":
    return policies.nothing_saveable
  by_name = policies.save_only_these_names(*NAMES[policy])
  return (
    policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, by_name) if policy == "minimal" else by_name
  )


def _kept_on_host(policy: RematPolicy, offload: RematOffload) -> Any:
  policies, where = jax.checkpoint_policies, {"offload_src": "device", "offload_dst": "pinned_host"}
  # Named values are either saved on the device or offloaded to the host.
  inputs, kept = offload in ("layer_inputs", "all"), offload in ("kept", "all")
  by_name = policies.save_and_offload_only_these_names(
    names_which_can_be_saved=() if kept else NAMES[policy],
    names_which_can_be_offloaded=(*((LAYER_INPUT,) if inputs else ()), *(NAMES[policy] if kept else ())),
    **where,
  )
  if policy != "minimal":
    return by_name
  dots = policies.offload_dot_with_no_batch_dims(**where) if kept else policies.dots_with_no_batch_dims_saveable
  # Each policy handles one kind of operation, and ``save_from_both_policies`` does not accept offloading policies.
  return lambda primitive, *args, **params: (by_name if primitive.name == "name" else dots)(primitive, *args, **params)


def _naming_its_carry(function):
  """Name the values that a layer reads from the carry, so that a policy can offload them."""

  def call(p, carry, ctx):
    return function(p, jax.tree.map(lambda x: checkpoint_name(x, LAYER_INPUT), carry), ctx)

  return call
