"""Configuration: YAML files, keys, what they mean and what contradicts, read into typed sections."""
