"""MaxText's words for what the forward pass keeps and where it lies, as ``remat_policy`` and ``remat_offload``.

In MaxText each tensor of a layer has a key of its own, which counts with ``remat_policy: custom``; here a policy names them
together. What comes to the same is translated, of the rest nothing is guessed.
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
"""Keys that say where a tensor lies: device, offload, or remat, which is nowhere."""

KEYS = ("remat_policy", *TENSORS)

_OUTPUTS = frozenset({"out_proj", "mlpwo"})
POLICIES: dict[frozenset[str], str] = {
  frozenset(): "full",
  frozenset({"context"}): "save_attention",
  _OUTPUTS: "save_outputs",
  _OUTPUTS | {"mlpwi_0", "mlpwi_1"}: "save_mlp",
  _OUTPUTS | {"mlpwi"}: "save_mlp",
}
"""What a policy of ours keeps, by MaxText's names."""

OFFLOADED = "minimal_offloaded"  # ours: minimal, of which what is kept lies on the host


def translated(found: Mapping[str, Entry], notes: list[str]) -> list[Entry]:
  """Entries of ours for those of ``KEYS`` that one file or command line has.

  Args:
    found: them, by key.
    notes: on what is another word here; added to.

  Raises:
    CoercionError: tensors that no policy keeps together, with what to write instead.
  """
  policy = found.get("remat_policy")
  text = policy.node.text if policy is not None and isinstance(policy.node, Scalar) else ""
  tensors = {name: found[name] for name in TENSORS if name in found}
  if policy is not None and text == "custom":
    return _said(policy, *_custom(tensors), notes)
  for name, entry in tensors.items():
    if _where(entry) != ("device" if name == INPUT else "remat"):
      raise CoercionError(
        f"{entry.origin}: {name} counts with remat_policy: custom beside it alone; here it is remat_offload=layer_inputs"
        if name == INPUT
        else f"{entry.origin}: {name} counts with remat_policy: custom beside it alone; here it is remat_policy=save_outputs"
      )
    notes.append(f"{entry.origin}: {name} has no effect without remat_policy=custom")
  if policy is None:
    return []
  return _said(policy, "minimal", "kept", notes) if text == OFFLOADED else [policy]


def _said(source: Entry, policy: str, offload: str, notes: list[str]) -> list[Entry]:
  values = {"remat_policy": policy, "remat_offload": offload}
  assert isinstance(source.node, Scalar)
  words = " ".join(f"{key}={value}" for key, value in values.items())
  notes.append(f"{source.origin}: remat_policy: {source.node.text} is {words} here")
  return [entry_of(key, value, source) for key, value in values.items()]


def _where(entry: Entry) -> str:
  where = coerce(entry.node, str)
  if where not in ("device", "offload", "remat"):
    raise CoercionError(f"{entry.origin}: {entry.key}: {where!r} is not one of device, offload, remat")
  return str(where)


def _custom(tensors: Mapping[str, Entry]) -> tuple[str, str]:
  """``remat_policy`` and ``remat_offload`` for the places of tensors."""
  where = {name: _where(entry) for name, entry in tensors.items()}
  inputs = where.pop(INPUT, "device")
  if inputs == "remat":
    raise CoercionError(f"{tensors[INPUT].origin}: {INPUT}: remat: a layer's input is kept; write device or offload")
  kept = {name: place for name, place in where.items() if place != "remat"}
  policy, places = POLICIES.get(frozenset(kept)), set(kept.values())
  if policy is None or len(places) > 1:
    first = tensors[next(iter(kept))]
    what = f"{', '.join(f'{name}: {place}' for name, place in kept.items())}"
    raise CoercionError(
      f"{first.origin}: remat_policy: custom with {what}: no policy here is that. save_attention keeps context, save_outputs "
      "out_proj and mlpwo, save_mlp mlpwi_0 and mlpwi_1 too, minimal all products, full none of them, together on the device, "
      "or with remat_offload=kept on the host"
    )
  names = {(False, False): "none", (True, False): "layer_inputs", (False, True): "kept", (True, True): "all"}
  return policy, names[inputs == "offload", places == {"offload"}]
