"""Attention: grouped-query attention, MLA, the sparse indexer, masks, rotary embeddings and the key-value cache."""
