"""What the forward pass keeps of a layer for the backward pass, and in which memory it waits for it."""

from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name

from maxtext_like.layers.precision import PRODUCT

RematPolicy = Literal["none", "minimal", "save_mlp", "save_outputs", "save_attention", "full"]


RematOffload = Literal["none", "layer_inputs", "kept", "all"]
LAYER_INPUT = "layer_input"  # the name of what a layer reads of the carry
NAMES: dict[RematPolicy, tuple[str, ...]] = {
  "minimal": (PRODUCT,),
  "full": (),
  "save_attention": ("attention",),
  "save_outputs": ("output",),
  "save_mlp": ("output", "mlp"),
}
"""What a policy keeps of a layer, by the names that layers give it; "minimal" keeps other products too."""


def remat(function, policy: RematPolicy, *, alone: bool, offload: RematOffload = "none"):
  """``jax.checkpoint`` under one of the named policies: what the forward pass keeps for the backward pass, and where.

  Where a layer is the whole body of a scan, nothing can merge its recomputation with the forward pass. Elsewhere XLA must
  be kept from it, and from computing several layers again at once; which takes a copy of each array that was kept.

  Args:
    function: (p, carry, ctx) -> anything, or where nothing is offloaded any function.
    policy: see ``NAMES``.
    alone: nothing stands beside it in the body of a scan, or the caller keeps it apart from what does.
    offload: what of it lies in the host's memory until the backward pass comes to it: arrays of the carry ("layer_inputs"),
      what the policy keeps besides ("kept"), "all", or "none".

  Raises:
    ValueError: offload under the policy "none", which says of nothing that it is kept.
  """
  if policy == "none":
    if offload != "none":
      raise ValueError(f"remat_offload {offload} with remat_policy none, which names nothing that is kept")
    return function
  saved = _kept_on_device(policy) if offload == "none" else _kept_on_host(policy, offload)
  if offload in ("layer_inputs", "all"):
    function = _naming_its_carry(function)
  return jax.checkpoint(function, policy=saved, prevent_cse=not alone)


def keeps(policy: RematPolicy, name: str) -> bool:
  """Whether a policy keeps products that layers give this name."""
  return policy in ("none", "minimal") or name in NAMES[policy]


def offload_under(policy: RematPolicy, offload: RematOffload) -> RematOffload:
  """What an offload is under another policy: "none" names nothing that is kept, "full" nothing but what layers read."""
  if policy == "none" or offload == "none":
    return "none"
  return "layer_inputs" if policy == "full" else offload


def _kept_on_device(policy: RematPolicy) -> Any:
  policies = jax.checkpoint_policies
  if policy == "full":
    return policies.nothing_saveable
  by_name = policies.save_only_these_names(*NAMES[policy])
  return (
    policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, by_name) if policy == "minimal" else by_name
  )


def _kept_on_host(policy: RematPolicy, offload: RematOffload) -> Any:
  policies, where = jax.checkpoint_policies, {"offload_src": "device", "offload_dst": "pinned_host"}
  inputs, kept = offload in ("layer_inputs", "all"), offload in ("kept", "all")
  by_name = policies.save_and_offload_only_these_names(
    names_which_can_be_saved=() if kept else NAMES[policy],
    names_which_can_be_offloaded=(*((LAYER_INPUT,) if inputs else ()), *(NAMES[policy] if kept else ())),
    **where,
  )
  if policy != "minimal":
    return by_name
  dots = policies.offload_dot_with_no_batch_dims(**where) if kept else policies.dots_with_no_batch_dims_saveable
  # Each knows one kind of instruction; ``save_from_both_policies`` takes none that offloads.
  return lambda primitive, *args, **params: (by_name if primitive.name == "name" else dots)(primitive, *args, **params)


def _naming_its_carry(function):
  """A layer that names what it reads of the carry, so that a policy can say where that lies."""

  def call(p, carry, ctx):
    return function(p, jax.tree.map(lambda x: checkpoint_name(x, LAYER_INPUT), carry), ctx)

  return call
