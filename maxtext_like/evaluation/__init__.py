"""Evaluation of weights: log-probabilities of texts, tasks of lm-evaluation-harness, and perplexity."""
