"""The command line: a module for each verb, which reads words, calls one function of the API, and prints."""
