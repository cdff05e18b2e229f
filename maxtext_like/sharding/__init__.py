"""Devices and how arrays are laid out over them."""
