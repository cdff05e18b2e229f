"""Configuration: reads YAML files and ``key=value`` words into typed, checked sections."""
