"""Statistics, first cause and in-training probes: where numbers leave their format, and why."""

from maxtext_like.numerics.xray import xray as xray
