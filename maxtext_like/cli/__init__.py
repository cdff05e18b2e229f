"""The command line: one module per verb, which parses its arguments, calls a function of the API, and prints the result."""
