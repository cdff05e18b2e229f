"""Attention: grouped-query attention, MLA, the sparse indexer, masks and rotary embeddings."""
