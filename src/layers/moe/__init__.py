"""Mixture of experts: routers, experts, auxiliary losses and expert parallelism."""
