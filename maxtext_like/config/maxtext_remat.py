"""Translates MaxText's rematerialization keys to ``remat_policy`` and ``remat_offload``.

In MaxText, ``remat_policy: custom`` has one key per tensor of a layer. Here a policy covers a set of tensors. Combinations with
an equivalent policy are translated; others are errors.
"""

from collections.abc import Mapping

from maxtext_like.config.coerce import CoercionError, coerce
from maxtext_like.config.maxtext_family import entry_of
from maxtext_like.config.yaml_file import Entry, Scalar

INPUT = "decoder_layer_input"
_OTHERS = (
  "context", "mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo", "moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo", "query_proj", "key_proj",
  "value_proj", "qkv_proj", "out_proj", "query_wa_proj", "kv_wa_proj", "mla_q", "mla_kv",
)  # fmt: skip
TENSORS = (INPUT, *_OTHERS)
"""Keys of single tensors. Values are device (kept), offload (kept in host memory) and remat (recomputed)."""

KEYS = ("remat_policy", *TENSORS)

_OUTPUTS = frozenset({"out_proj", "mlpwo"})
POLICIES: dict[frozenset[str], str] = {
  frozenset(): "full",
  frozenset({"context"}): "save_attention",
  _OUTPUTS: "save_outputs",
  _OUTPUTS | {"mlpwi_0", "mlpwi_1"}: "save_mlp",
  _OUTPUTS | {"mlpwi"}: "save_mlp",
}
"""Our policy for each set of kept tensors, by MaxText's names."""

OFFLOADED = "minimal_offloaded"  # here: remat_policy=minimal remat_offload=kept


def translated(found: Mapping[str, Entry], notes: list[str]) -> list[Entry]:
  """Return our entries for the entries of ``KEYS`` in one file or command line.

  Args:
    found: entries of ``KEYS``.
    notes: list to which notes on translated values are appended.

  Raises:
    CoercionError: no policy keeps this set of tensors. The message says what to write.
  """
  policy = found.get("remat_policy")
  text = policy.node.text if policy is not None and isinstance(policy.node, Scalar) else ""
  tensors = {name: found[name] for name in TENSORS if name in found}
  if policy is not None and text == "custom":
    return _said(policy, *_custom(tensors), notes)
  for name, entry in tensors.items():
    if _where(entry) != ("device" if name == INPUT else "remat"):
      raise CoercionError(
        f"{entry.origin}: {name} has an effect only with remat_policy: custom",
        fix="write remat_offload=layer_inputs" if name == INPUT else "write remat_policy=save_outputs",
      )
    notes.append(f"{entry.origin}: {name} has no effect without remat_policy=custom")
  if policy is None:
    return []
  return _said(policy, "minimal", "kept", notes) if text == OFFLOADED else [policy]


def _said(source: Entry, policy: str, offload: str, notes: list[str]) -> list[Entry]:
  values = {"remat_policy": policy, "remat_offload": offload}
  assert isinstance(source.node, Scalar)
  words = " ".join(f"{key}={value}" for key, value in values.items())
  notes.append(f"{source.origin}: remat_policy: {source.node.text} is translated to {words}")
  return [entry_of(key, value, source) for key, value in values.items()]


def _where(entry: Entry) -> str:
  where = coerce(entry.node, str)
  if where not in ("device", "offload", "remat"):
    raise CoercionError(f"{entry.origin}: {entry.key}: {where!r} is not one of device, offload, remat", fix="write one of them")
  return str(where)


def _custom(tensors: Mapping[str, Entry]) -> tuple[str, str]:
  """Return ``remat_policy`` and ``remat_offload`` for the values of the tensors' keys."""
  where = {name: _where(entry) for name, entry in tensors.items()}
  inputs = where.pop(INPUT, "device")
  if inputs == "remat":
    raise CoercionError(
      f"{tensors[INPUT].origin}: {INPUT}: remat: the input of a layer is always kept", fix="write device or offload"
    )
  kept = {name: place for name, place in where.items() if place != "remat"}
  policy, places = POLICIES.get(frozenset(kept)), set(kept.values())
  if policy is None or len(places) > 1:
    first = tensors[next(iter(kept))]
    what = f"{', '.join(f'{name}: {place}' for name, place in kept.items())}"
    raise CoercionError(
      f"{first.origin}: remat_policy: custom with {what}: no policy keeps exactly these",
      fix="write remat_policy=save_attention (keeps context), save_outputs (out_proj and mlpwo), save_mlp (these and "
      "mlpwi_0 and mlpwi_1), minimal (all matrix products) or full (nothing); "
      "remat_offload=kept moves the kept tensors to host memory",
    )
  names = {(False, False): "none", (True, False): "layer_inputs", (False, True): "kept", (True, True): "all"}
  return policy, names[inputs == "offload", places == {"offload"}]
