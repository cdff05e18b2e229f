"""Draws random cases: a config.json in the Hub's form, and how its checkpoint is written and run.

A family and a seed determine a case. Only ``random`` and ``numpy`` draw its numbers, so it is the same on every machine.
"""

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

Config = dict[str, Any]
TILE = 512  # queries per tile of attention (src/layers/kernels/attention/blockwise.py); longer rows have several tiles
KINDS = ("sliding_attention", "full_attention")
IGNORED = -100


@dataclass(frozen=True)
class Case:
  """One model and one batch.

  Attributes:
    family: key of ``FAMILIES``.
    seed: seed of weights and inputs.
    config: config.json in the Hub's form.
    form: how the checkpoint is written: "hub" (this config, released names), "saved" (config and names as transformers saves
      them), "memory" (the names of transformers' modules).
    stored: dtype of the file; every weight is representable in it.
    rows, length: B and T.
    tokens: layout of the rows: "plain", "right" or "left" padding, "left, positions" (left padding with positions that count
      from the first token), "packed" (documents separated by their positions), "offset" (positions that start above 0).
    images: number of images in the batch; 0 for text only.
    words: configuration overrides for our side.
    salt: changes the weights, in case rounding decides which expert or key is chosen.
  """

  family: str
  seed: int
  config: Config
  form: str = "hub"
  stored: str = "float32"
  rows: int = 2
  length: int = 16
  tokens: str = "plain"
  images: int = 0
  words: tuple[str, ...] = ()
  salt: int = 0

  @property
  def text(self) -> Config:
    """The config of the text model."""
    return self.config.get("text_config", self.config)

  def generator(self, what: str) -> np.random.Generator:
    """Returns a random generator for one purpose. Draws for other purposes do not change its numbers."""
    return np.random.default_rng([zlib.crc32(f"{self.family}/{what}".encode()), self.seed, self.salt])


def draw(family: str, seed: int) -> Case:
  """Draws the case of a family and a seed."""
  r = random.Random(f"{family}/{seed}")
  length = _length(r)
  config, images = FAMILIES[family](r, length)
  words = [f"scan_layers={r.choice(['true', 'false'])}", f"module_api={r.choice(['linen', 'nnx'])}"]
  if r.random() < 0.2:
    words.append("remat_policy=full")
  case = Case(
    family=family,
    seed=seed,
    config=config,
    form=r.choice(["hub", "saved", "memory"]),
    stored=r.choice(["float32", "bfloat16"]),
    rows=r.choice([1, 2, 2, 3]) if length <= 64 else r.choice([1, 2]),
    length=length,
    tokens=r.choice(["plain", "right", "left", "left, positions", "packed", "packed", "offset"]),
    words=tuple(words),
  )
  if images and r.random() < 0.8:
    count = r.choice([1, 1, 2, 3])
    # Images are recognized by their tokens only, and transformers does not separate documents in rows with images.
    tokens = "plain" if case.tokens in ("packed", "offset") else case.tokens
    case = with_images(case, count, tokens)
  return case


def with_images(case: Case, count: int, tokens: str) -> Case:
  """Returns the case with images, in rows long enough for them and for text between."""
  case = replace(case, images=count, tokens=tokens)
  return replace(case, length=max(case.length, least_length(case)))


def least_length(case: Case) -> int:
  """Returns the length of the shortest row that has room for the images and for text between."""
  tokens = case.config["mm_tokens_per_image"] if case.config["model_type"] == "gemma3" else 6
  return max(4, case.images * (tokens + 3) + 6) if case.images else 4


def _length(r: random.Random) -> int:
  """Draws the length of a row: short, for speed, or longer than a tile of attention, often near the edge of a tile."""
  if r.random() < 0.55:
    return r.randint(4, 40)
  return r.choice([TILE, TILE + 1, TILE + 2, 640, 2 * TILE, 2 * TILE + 1, r.randint(TILE + 1, 700), r.randint(520, 1100)])


def _window(r: random.Random, length: int) -> int:
  """Draws a sliding window, often near the edge of a tile or a lane."""
  if length <= TILE // 2 or r.random() < 0.25:
    return r.randint(1, min(length, 40) + 2)
  return r.choice([64, 127, 128, 129, 130, 384, 385, 386, 510, 511, 512, 513, 514, 600, 640, 1024, r.randint(41, length + 2)])


def _optional(r: random.Random, config: Config, chance: float = 0.5, **values: Any) -> None:
  """Sets each key with probability ``chance``. Missing keys have the defaults of transformers' config class."""
  config.update({key: value for key, value in values.items() if r.random() < chance})


def _gemma(r: random.Random, length: int) -> Config:
  kv = r.choice([1, 1, 2, 3])
  heads = kv * r.choice([1, 2, 3, 4])
  layers = r.choice([1, 2, 3, 3, 4, 5])
  config: Config = {
    "vocab_size": r.randint(40, 150),
    "hidden_size": heads * max(r.choice([4, 6, 8]), -(-16 // heads)),  # norms of fewer numbers magnify rounding errors
    "intermediate_size": r.choice([12, 24, 40]),
    "num_hidden_layers": layers,
    "num_attention_heads": heads,
    "num_key_value_heads": kv,
    "head_dim": r.choice([4, 8, 10, 16]),
    "sliding_window": _window(r, length),
  }
  if r.random() < 0.8:
    config["layer_types"] = [r.choice(KINDS) for _ in range(layers)]
  _optional(r, config, 0.4, rms_norm_eps=r.choice([1e-6, 1e-5, 1e-3]), final_logit_softcapping=r.choice([None, 3.0, 30.0]))
  _optional(r, config, 0.4, max_position_embeddings=r.choice([64, 4096, 131072]), pad_token_id=r.choice([0, 3]))
  _optional(r, config, 0.3, attention_bias=False, eos_token_id=r.choice([1, [1, 7], 5000]), bos_token_id=r.choice([2, 5000]))
  _optional(r, config, 0.5, tie_word_embeddings=r.random() < 0.6)
  return config


def _gemma3(r: random.Random, length: int) -> Config:
  config = _gemma(r, length)
  if "layer_types" not in config:
    _optional(r, config, 0.7, sliding_window_pattern=r.randint(1, 4))
  config["query_pre_attn_scalar"] = r.choice([1, 4, 16, config["head_dim"], 256])
  full = {"rope_theta": r.choice([1e4, 5e5, 1e6])}
  if r.random() < 0.5:
    scaling = {"rope_type": "linear", "factor": r.choice([1.0, 2.0, 8.0, 3.7])}
    old_spelling = r.random() < 0.3  # transformers reads it in rope_parameters only
  else:
    scaling, old_spelling = r.choice([None, {"rope_type": "default"}]), False
  local = r.choice([100.0, 1e4])
  if r.random() < 0.5:
    _optional(r, config, 0.7, **full, rope_local_base_freq=local)
    _optional(r, config, 0.8 if scaling is None else 1.0, rope_scaling=scaling)
  else:
    spelled = {"type" if old_spelling else "rope_type": (scaling or {"rope_type": "default"})["rope_type"]}
    config["rope_parameters"] = {
      "full_attention": {**spelled, **full} | ({"factor": scaling["factor"]} if scaling and "factor" in scaling else {}),
      "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }
  return config


def _gemma3_text(r: random.Random, length: int) -> tuple[Config, bool]:
  return {"model_type": "gemma3_text", **_gemma3(r, length)}, False


def _gemma3_vision(r: random.Random, length: int) -> tuple[Config, bool]:
  text = _gemma3(r, min(length, 700))
  text.pop("final_logit_softcapping", None)
  side, pool, heads = r.choice([2, 3]), r.choice([1, 2]), r.choice([1, 2])
  patch = r.choice([2, 3])
  vision: Config = {
    "model_type": "siglip_vision_model",
    "hidden_size": heads * r.choice([8, 12]),
    "intermediate_size": r.choice([8, 20]),
    "num_hidden_layers": r.choice([1, 2, 3]),
    "num_attention_heads": heads,
    "patch_size": patch,
    "image_size": side * pool * patch,
  }
  _optional(r, vision, 0.5, layer_norm_eps=1e-5)
  _optional(r, vision, 0.7, vision_use_head=False)  # as in released files: no pooling head
  config: Config = {
    "model_type": "gemma3",
    "text_config": text,
    "vision_config": vision,
    "mm_tokens_per_image": side * side,
    "image_token_index": text["vocab_size"] - r.choice([1, 5]),
    "boi_token_index": 7,
    "eoi_token_index": 8,
  }
  return _move_tied(r, config), True


def _move_tied(r: random.Random, config: Config) -> Config:
  """Puts ``tie_word_embeddings`` at the top level of a config with a tower, or at both levels."""
  text = config["text_config"]
  if "tie_word_embeddings" in text:
    config["tie_word_embeddings"] = text["tie_word_embeddings"]
    if r.random() < 0.5:
      del text["tie_word_embeddings"]
  return config


def _gemma4(r: random.Random, length: int) -> Config:
  config = _gemma(r, length)
  layers, kv = config["num_hidden_layers"], config["num_key_value_heads"]
  config["global_head_dim"] = r.choice([config["head_dim"], 4, 8, 12, 16])
  if r.random() < 0.5:
    config["attention_k_eq_v"] = True
  if config.get("attention_k_eq_v") or r.random() < 0.2:
    divisors = [n for n in (1, 2, 3, kv) if config["num_attention_heads"] % n == 0]
    _optional(r, config, 0.8, num_global_key_value_heads=r.choice([None, *divisors]))
  config["hidden_size_per_layer_input"] = 0
  _optional(r, config, 0.3, vocab_size_per_layer_input=config["vocab_size"] + r.choice([0, 5]))
  _optional(r, config, 0.3, num_kv_shared_layers=0, enable_moe_block=False, use_double_wide_mlp=r.random() < 0.5)
  if r.random() < 0.7:
    share = r.choice([0.25, 0.3, 0.5, 1.0])
    full = r.choice([{"rope_type": "proportional", "partial_rotary_factor": share}, {"rope_type": "default"}])
    config["rope_parameters"] = {
      "full_attention": full | {"rope_theta": r.choice([1e4, 1e6])},
      "sliding_attention": {"rope_type": "default", "rope_theta": r.choice([100.0, 1e4])},
    }
  assert layers >= 1
  return config


def _nest(r: random.Random, text: Config, chance: float) -> Config:
  """Returns the config of a Gemma 4 text model, or of a multimodal model without towers that contains the text model."""
  if r.random() >= chance:
    return {"model_type": "gemma4_text", **text}
  nested = {"model_type": "gemma4", "text_config": text, "vision_config": None, "audio_config": None, **_placeholders(text)}
  return _move_tied(r, nested)


def _placeholders(text: Config) -> Config:
  last = text["vocab_size"] - 1
  markers = {"boi_token_id": last - 4, "eoi_token_id": last - 5}
  return {"image_token_id": last, "video_token_id": last - 1, "audio_token_id": last - 2, **markers}


def _gemma4_dense(r: random.Random, length: int) -> tuple[Config, bool]:
  return _nest(r, _gemma4(r, length), 0.3), False


def _gemma4_moe(r: random.Random, length: int) -> tuple[Config, bool]:
  experts = r.choice([1, 2, 3, 4, 8])
  text = _gemma4(r, length) | {
    "enable_moe_block": True,
    "num_experts": experts,
    "top_k_experts": r.randint(1, min(experts, 4)),
    "moe_intermediate_size": r.choice([4, 10, 16]),
  }
  return _nest(r, text, 0.5), False


def _gemma4_e(r: random.Random, length: int) -> tuple[Config, bool]:
  """Draws a model like E2B and E4B: with per-layer inputs, and keys and values that the last layers share."""
  text = _gemma4(r, length)
  layers = text["num_hidden_layers"] = r.choice([2, 3, 4, 5])
  text["layer_types"] = [r.choice(KINDS) for _ in range(layers)]
  text["hidden_size_per_layer_input"] = r.choice([4, 6, 8])
  text["vocab_size_per_layer_input"] = text["vocab_size"] + r.choice([0, 0, 5])
  used = [*text["layer_types"][:-1], "full_attention"]
  allowed = [n for n in range(layers) if set(used[: layers - n]) >= set(used)]
  text["num_kv_shared_layers"] = r.choice(allowed)
  text["use_double_wide_mlp"] = r.random() < 0.5
  return _nest(r, text, 0.5), False


def _gemma4_vision(r: random.Random, length: int) -> tuple[Config, bool]:
  text = (_gemma4_e if r.random() < 0.4 else _gemma4_moe if r.random() < 0.3 else _gemma4_dense)(r, min(length, 700))[0]
  text = {key: value for key, value in text.get("text_config", text).items() if key != "model_type"}
  text["use_bidirectional_attention"] = r.choice([None, "vision", "vision"])
  heads = r.choice([1, 2])
  vision: Config = {
    "model_type": "gemma4_vision",
    "hidden_size": heads * r.choice([8, 12]),
    "intermediate_size": r.choice([8, 20]),
    "num_hidden_layers": r.choice([1, 2, 3]),
    "num_attention_heads": heads,
    "num_key_value_heads": heads,
    "head_dim": r.choice([4, 8]),
    "patch_size": r.choice([2, 3]),
    "pooling_kernel_size": r.choice([2, 3]),  # with 1, transformers treats padding as patches
    "position_embedding_size": r.choice([12, 20]),
  }
  _optional(r, vision, 0.5, standardize=True, use_clipped_linears=True, rms_norm_eps=1e-5)
  config = {"model_type": "gemma4", "text_config": text, "vision_config": vision, "audio_config": None}
  return _move_tied(r, config | _placeholders(text)), True


def _deepseek(r: random.Random, length: int) -> Config:
  heads, layers = r.choice([1, 2, 3, 4]), r.choice([1, 2, 3, 4])
  groups, size = r.choice([1, 1, 2, 3, 4]), r.choice([2, 3, 4])
  kept = r.randint(1, groups)
  config: Config = {
    "vocab_size": r.randint(40, 150),
    "hidden_size": r.choice([16, 24, 40]),
    "intermediate_size": r.choice([12, 24]),
    "moe_intermediate_size": r.choice([4, 10]),
    "num_hidden_layers": layers,
    "num_attention_heads": heads,
    "num_key_value_heads": heads,
    "n_routed_experts": groups * size,
    "n_shared_experts": r.choice([0, 1, 1, 2]),
    "n_group": groups,
    "topk_group": kept,
    "num_experts_per_tok": r.randint(1, kept * size),
    "first_k_dense_replace": r.randint(0, layers),
    "q_lora_rank": r.choice([None, 8, 12]),
    "kv_lora_rank": r.choice([8, 16]),
    "qk_nope_head_dim": r.choice([4, 8, 12]),
    "qk_rope_head_dim": r.choice([2, 4, 8]),
    "v_head_dim": r.choice([4, 8, 10]),
  }
  _optional(r, config, 0.5, norm_topk_prob=r.random() < 0.5, routed_scaling_factor=r.choice([1.0, 2.5, 0.7]))
  _optional(r, config, 0.4, attention_bias=r.random() < 0.5, tie_word_embeddings=r.random() < 0.5, hidden_act="silu")
  _optional(r, config, 0.4, rms_norm_eps=r.choice([1e-6, 1e-5]), pad_token_id=r.choice([None, 0, 3]))
  _optional(
    r, config, 0.3, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1, eos_token_id=r.choice([1, [1, 5]])
  )
  _optional(r, config, 0.5, max_position_embeddings=r.choice([64, 4096, 16384]))
  return config | _deepseek_rope(r, config)


def _qwen3(r: random.Random, length: int) -> Config:
  kv = r.choice([1, 1, 2, 3])
  heads, layers = kv * r.choice([1, 2, 4]), r.choice([1, 2, 3, 4])
  config: Config = {
    "vocab_size": r.randint(40, 150),
    "hidden_size": r.choice([16, 24, 40]),
    "intermediate_size": r.choice([12, 24]),
    "num_hidden_layers": layers,
    "num_attention_heads": heads,
    "num_key_value_heads": kv,
    "head_dim": r.choice([8, 10, 16]),
  }
  _optional(r, config, 0.4, tie_word_embeddings=r.random() < 0.5, hidden_act="silu", attention_bias=False)
  _optional(r, config, 0.4, rms_norm_eps=r.choice([1e-6, 1e-5]), pad_token_id=r.choice([None, 0, 3]))
  _optional(r, config, 0.3, use_sliding_window=False, sliding_window=None, eos_token_id=r.choice([1, [1, 5]]))
  _optional(r, config, 0.5, max_position_embeddings=r.choice([64, 4096, 16384]), rope_scaling=None)
  theta = r.choice([100.0, 1e4, 1e6])
  return config | ({"rope_theta": theta} if r.random() < 0.7 else {"rope_parameters": {"rope_theta": theta}})


def _qwen3_moe(r: random.Random, length: int) -> Config:
  experts = r.choice([1, 2, 4, 6])
  config = {
    "moe_intermediate_size": r.choice([4, 10]),
    "num_experts": experts,
    "num_experts_per_tok": r.randint(1, experts),
  }
  _optional(r, config, 0.6, norm_topk_prob=r.random() < 0.7, decoder_sparse_step=1, mlp_only_layers=r.choice([None, []]))
  return _qwen3(r, length) | config


def _deepseek_rope(r: random.Random, config: Config) -> Config:
  theta = r.choice([100.0, 1e4, 5e4])
  if r.random() < 0.35:
    plain = [{"rope_theta": theta}, {"rope_theta": theta, "rope_scaling": None}, {}]
    return r.choice([*plain, {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}])
  yarn: Config = {r.choice(["type", "rope_type"]): "yarn", "factor": r.choice([1.0, 2.0, 4.0, 40.0])}
  original = r.choice([8, 32, 512, 4096])
  _optional(r, yarn, 0.7, beta_fast=r.choice([32, 16, 4]), beta_slow=r.choice([1, 2]))
  _optional(r, yarn, 0.7, mscale=r.choice([1.0, 0.707, 0.0]), mscale_all_dim=r.choice([1.0, 0.707, 0.5, 0.0]))
  if "max_position_embeddings" in config or r.random() < 0.8:
    _optional(r, yarn, 0.8, original_max_position_embeddings=original)
  _optional(r, yarn, 0.1, truncate=True)
  for key in ("beta_fast", "beta_slow", "mscale"):  # null means the default, too
    if r.random() < 0.1:
      yarn[key] = None
  if r.random() < 0.5:
    return {"rope_theta": theta, "rope_scaling": yarn}
  return {"rope_parameters": yarn | {"rope_theta": theta, "rope_type": "yarn"}}


def _deepseek3(r: random.Random, length: int) -> tuple[Config, bool]:
  config = {"model_type": "deepseek_v3", **_deepseek(r, length)}
  _optional(r, config, 0.4, rope_interleave=r.random() < 0.4, num_nextn_predict_layers=0)
  return config, False


def _deepseek32(r: random.Random, length: int) -> tuple[Config, bool]:
  config = {"model_type": "deepseek_v32", **_deepseek(r, length)}
  config["q_lora_rank"] = config["q_lora_rank"] or 12
  # If all relus of several keys are 0, their scores are equal and the two sides choose different keys. Many heads make
  # that rare.
  config |= {"index_n_heads": r.choice([16, 24]), "index_head_dim": config["qk_rope_head_dim"] + r.choice([0, 4, 8])}
  config["index_topk"] = r.choice([1, 3, r.randint(1, length), length, length + 7])
  if r.random() < 0.2:
    dense = config.pop("first_k_dense_replace")
    config["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (config["num_hidden_layers"] - dense)
  return config, False


FAMILIES: dict[str, Callable[[random.Random, int], tuple[Config, bool]]] = {
  "gemma3": _gemma3_text,
  "gemma3_vision": _gemma3_vision,
  "gemma4": _gemma4_dense,
  "gemma4_moe": _gemma4_moe,
  "gemma4_e": _gemma4_e,
  "gemma4_vision": _gemma4_vision,
  "deepseek3": _deepseek3,
  "deepseek3.2": _deepseek32,
  "qwen3": lambda r, length: (_qwen3(r, length) | {"model_type": "qwen3"}, False),
  "qwen3_moe": lambda r, length: (_qwen3_moe(r, length) | {"model_type": "qwen3_moe"}, False),
}


def arrays(case: Case) -> dict[str, np.ndarray]:
  """Returns the batch under transformers' names. Labels are ignored where a prediction is meaningless."""
  rng, (B, T) = case.generator("inputs"), (case.rows, case.length)
  # Multimodal models use the last few ids as placeholders of images and audio.
  ids = rng.integers(0, case.text["vocab_size"] - (6 if "text_config" in case.config else 0), (B, T))
  found: dict[str, np.ndarray] = {"input_ids": ids}
  labels = np.where(rng.random((B, T)) < 0.15, IGNORED, ids)
  firsts = np.zeros((B, T), bool)
  lengths = [T, *(int(n) for n in rng.integers(1, T + 1, B - 1))] if T > 2 else [T] * B
  if case.tokens in ("right", "left", "left, positions"):
    index = np.arange(T)[None]
    count = np.array(lengths)[:, None]
    mask = index < count if case.tokens == "right" else index >= T - count
    found["attention_mask"] = mask.astype(np.int64)
    labels[~mask] = IGNORED
    firsts[:, 1:] = mask[:, 1:] & ~mask[:, :-1]
    if case.tokens == "left, positions":
      found["position_ids"] = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
  if case.tokens == "packed":
    found["position_ids"] = np.stack([_packed(rng, T) for _ in range(B)])
    firsts[:, 1:] = np.diff(found["position_ids"], axis=1) != 1
  if case.tokens == "offset":
    found["position_ids"] = np.arange(T)[None] + rng.integers(0, 50, (B, 1))
  labels[firsts] = IGNORED
  if case.images:
    found |= _images(case, rng, ids, labels)
  if (labels[:, 1:] == IGNORED).all():
    labels[0, -1] = ids[0, -1]
  return found | {"labels": labels}


def _packed(rng: np.random.Generator, length: int) -> np.ndarray:
  """Returns the positions of packed documents in a row. Documents end anywhere, and often at the edge of a tile."""
  edges = {int(n) for n in rng.integers(1, length, 3)} if length > 1 else set()
  edges |= {edge for edge in (TILE - 1, TILE, TILE + 1, 2 * TILE) if edge < length and rng.random() < 0.4}
  starts = np.zeros(length, np.int64)
  starts[sorted(edges)] = sorted(edges)
  return np.arange(length) - np.maximum.accumulate(starts)


def _images(case: Case, rng: np.random.Generator, ids: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
  """Returns pixels and token types. Writes the image tokens into ``ids``, with text before each image, and sets ``labels``."""
  config, vision = case.config, case.config["vision_config"]
  gemma3 = config["model_type"] == "gemma3"
  token = config["image_token_index" if gemma3 else "image_token_id"]
  if gemma3:
    sizes = [config["mm_tokens_per_image"]] * case.images
    pixels = rng.uniform(-1, 1, (case.images, 3, vision["image_size"], vision["image_size"]))
    found: dict[str, np.ndarray] = {"pixel_values": pixels.astype(np.float32)}
  else:
    pool = vision["pooling_kernel_size"]
    grids = [(int(w), int(h)) for w, h in zip(rng.integers(1, 4, case.images), rng.integers(1, 3, case.images), strict=True)]
    sizes = [w * h for w, h in grids]
    patches = (max(sizes) + int(rng.integers(0, 2))) * pool * pool
    pixels = np.zeros((case.images, patches, 3 * vision["patch_size"] ** 2), np.float32)
    where = np.full((case.images, patches, 2), -1, np.int64)
    for i, (w, h) in enumerate(grids):
      count = w * h * pool * pool
      where[i, :count] = [(x, y) for y in range(h * pool) for x in range(w * pool)]
      pixels[i, :count] = rng.random((count, pixels.shape[2]))
    found = {"pixel_values": pixels, "image_position_ids": where}
  types = np.zeros(ids.shape, np.int64)
  # All images are in the first row, which has no padding.
  space = case.length - sum(sizes) - case.images
  cuts = np.sort(rng.integers(0, space + 1, case.images))
  for i, (cut, size) in enumerate(zip(cuts, sizes, strict=True)):
    start = int(cut) + sum(sizes[:i]) + i + 1
    ids[0, start : start + size], types[0, start : start + size] = token, 1
    labels[0, start : start + size] = IGNORED
  found["token_type_ids" if gemma3 else "mm_token_type_ids"] = types
  return found
