"""Tokenizers: loading, special tokens, and tokenizing documents."""
