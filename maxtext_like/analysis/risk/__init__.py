"""Overflow risk of a configuration or a checkpoint: bounds of every quantity compared with the range of its dtype. One file per
family of models.
"""
