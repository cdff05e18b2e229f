"""Tests the three forms of the report (table, JSON, one HTML file) and the statistics in them."""

import html.parser
import itertools
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from maxtext_like.numerics import tensor_statistics
from maxtext_like.numerics import xray_report as html_page
from maxtext_like.numerics.xray import xray
from tests.tiers import slow


def stats_of(x, **options):
  row = jax.jit(lambda x: tensor_statistics.stack([tensor_statistics.row(x, **options)])[0])(x)
  return tensor_statistics.decode(row, full=options.get("full", True), dtype=x.dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_statistics_equal_numpy(dtype):
  rng = np.random.default_rng(0)
  x = (rng.standard_normal((13, 7)) * 10.0 ** rng.integers(-12, 3, (13, 7))).astype(ml_dtypes.finfo(dtype).dtype)
  x[0, :3] = 0
  x32 = x.astype(np.float32)
  finite = np.abs(x32[np.isfinite(x32)])
  s = stats_of(jnp.asarray(x))
  assert s.max == finite.max()
  assert s.min_nonzero == finite[finite > 0].min()
  np.testing.assert_allclose(s.rms, np.sqrt((x32.astype(np.float64) ** 2).mean()), rtol=1e-5)
  assert (s.zero * 91).round() == (x32 == 0).sum()
  assert s.negative == (x32 < 0).sum()
  for fmt in ("float16", "float8_e4m3fn", "float8_e5m2"):
    lost = (x32.astype(ml_dtypes.finfo(fmt).dtype).astype(np.float32) == 0) & (x32 != 0)
    np.testing.assert_allclose(s.flushed[fmt] * 91, lost.sum(), atol=1e-6)
    np.testing.assert_allclose(s.headroom[fmt], np.log2(float(ml_dtypes.finfo(fmt).max) / finite.max()), rtol=1e-6)
  tiny = float(ml_dtypes.finfo(dtype).tiny)
  np.testing.assert_allclose(s.subnormal * 91, (np.abs(x32) < tiny).sum(), atol=1e-6)


def test_nonfinite_numbers_are_counted_apart_and_kept_out_of_the_maximum():
  x = jnp.asarray([1.0, -jnp.inf, jnp.nan, jnp.inf, -jnp.inf, -5.0, -jnp.nan])
  for full in (True, False):
    s = stats_of(x, full=full)
    assert (int(s.nan), int(s.inf), int(s.neg_inf), float(s.max), int(s.count)) == (2, 3, 2, 5.0, 7)
  assert int(stats_of(jnp.exp(jnp.asarray([jnp.nan, 1.0]))).nan) == 1
  assert int(stats_of(jnp.asarray([jnp.nan + 1j, 1.0])).nan) == 1


@pytest.mark.parametrize("dtype", ["float32", slow("float16"), slow("bfloat16"), "complex64"])
@pytest.mark.parametrize("value", [0.0, -3.0, 1e-6, np.inf, -np.inf, np.nan])
def test_a_scalar_is_measured_like_an_array(dtype, value):
  if dtype == "complex64" and value == -np.inf:
    return  # a complex infinity has no sign
  x = jnp.asarray(value, dtype)
  scalar = stats_of(x)
  array = stats_of(jnp.stack([x, x]))
  for name in ("max", "rms", "min_nonzero", "zero", "subnormal"):
    np.testing.assert_allclose(getattr(scalar, name), getattr(array, name), rtol=1e-6, err_msg=name)
  for name in ("nan", "inf", "neg_inf", "count"):
    assert 2 * int(getattr(scalar, name)) == int(getattr(array, name)), name


def test_rows_merge_like_one_tensor():
  a, b = jnp.asarray([1.0, -2.0, 0.0]), jnp.asarray([jnp.inf, 1e-30, 7.0])
  rows = np.stack([np.asarray(tensor_statistics.stack([tensor_statistics.row(v)])[0]) for v in (a, b)])
  both = tensor_statistics.decode(tensor_statistics.stack([tensor_statistics.row(jnp.concatenate([a, b]))])[0])
  for merged in (tensor_statistics.merge_axis(rows), np.asarray(tensor_statistics.merge(rows[0], rows[1]))):
    s = tensor_statistics.decode(merged)
    for name in ("count", "max", "min_nonzero", "nan", "inf", "zero", "subnormal", "negative"):
      np.testing.assert_array_equal(getattr(s, name), getattr(both, name), err_msg=name)


def broken():
  ws = jnp.ones((6, 4, 4), jnp.float16).at[2].mul(1e3)
  fn = lambda ws, x: lax.scan(lambda c, w: ((c @ w) * (c @ w) / 16, c.max()), x, ws)
  return xray(fn)(ws, jnp.ones((3, 4), jnp.float16))


def test_table_names_the_cause_and_the_worst_tensors():
  report = broken()
  lines = report.table(5).splitlines()
  assert lines[0] == f"first cause: {report.first_cause}"
  assert "layer 2" in lines[0]
  assert "bits to float16" in "".join(lines)
  assert lines[1] == ""
  assert lines[2].split()[:3] == ["tensor", "dtype", "shape"]
  assert len(lines) == 3 + 5
  assert "float8_e4m3fn" in report.table(3, "float8_e4m3fn")


def test_json_is_strict_and_complete():
  report = broken()
  document = json.loads(report.to_json(), parse_constant=pytest.fail)
  assert document["first_cause"]["layer"] == 2
  assert document["text"] == str(report.first_cause)
  assert len(document["tensors"]) == len(report.tensors)
  dot = next(t for t in document["tensors"] if t["op"] == "dot_general")
  assert len(dot["stats"]["max"]) == 6
  assert set(dot["stats"]["headroom"]) == set(tensor_statistics.FORMATS)


class Reader(html.parser.HTMLParser):
  def __init__(self):
    super().__init__()
    self.open, self.text, self.tags, self.links = [], [], set(), []

  def handle_starttag(self, tag, attrs):
    self.tags.add(tag)
    self.links += [v for k, v in attrs if k in ("src", "href")]
    if tag not in ("meta", "br"):
      self.open.append(tag)

  def handle_endtag(self, tag):
    while self.open and self.open[-1] != tag and self.open[-1] in ("li",):
      self.open.pop()
    assert self.open.pop() == tag, tag

  def handle_data(self, data):
    self.text.append(data)


def test_html_is_one_well_formed_page_without_script_or_network():
  report = broken()
  page = report.html("a <title>")
  reader = Reader()
  reader.feed(page)
  assert reader.open == []
  assert not reader.tags & {"script", "link", "img", "iframe"}
  assert reader.links == []
  assert "http" not in page
  text = "".join(reader.text)
  assert str(report.first_cause) in text
  assert "a <title>" in text
  assert "✕" in text
  assert "layer 0 to 5" in text


def test_colors_fall_in_lightness_with_headroom_and_text_stays_readable():
  def lightness(c):
    channels = [int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

  cells = [html_page.color(b) for b in np.linspace(0, 16, 33)]
  backs = [lightness(back) for back, _ in cells]
  assert all(a > b for a, b in itertools.pairwise(backs))
  for back, ink in cells:
    light, dark = sorted([lightness(back), lightness(ink)], reverse=True)
    assert (light + 0.05) / (dark + 0.05) > 4.0
  assert html_page.symbol(3.7, 0) == "3"
  assert [html_page.symbol(b, n) for b, n in ((-1, 0), (5, 2), (np.inf, 0), (np.nan, 0))] == ["▲", "✕", "∞", "·"]


@pytest.mark.parametrize("level", ["full", "light", "flag"])
def test_a_tensor_that_is_nan_throughout_has_no_headroom(level):
  """The tensor has no finite number, so its maximum is NaN. A maximum of 0 would mean infinitely many bits of headroom."""
  x = jnp.full((3, 5), jnp.nan)
  rows = tensor_statistics.stack([tensor_statistics.row(x, full=level == "full", flag=level == "flag")])
  s = tensor_statistics.decode(rows, full=level == "full")
  assert np.isnan(s.max).all()
  assert all(np.isnan(bits).all() for bits in s.headroom.values())


def test_tables_say_nan_where_nothing_is_finite():
  report = xray(lambda x: jnp.log(x - 2) * 2)(jnp.ones((3, 5)))
  line = next(line for line in report.table().splitlines() if " mul " in line)
  assert line.count("NaN") == 2, line
  assert "inf" not in line
  page = report.html()
  assert "inf bits" not in page
  assert "15 non-finite, no size" in page
