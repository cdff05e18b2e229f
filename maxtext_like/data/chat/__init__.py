"""Conversations: reading them from records, rendering them with the template of a model, and marking the parts to learn."""
