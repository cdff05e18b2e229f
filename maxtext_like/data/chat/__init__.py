"""Conversations: read from records, rendered as each family's models know them, with what is trained on marked."""
