"""Known numerical failures, one function each: the policy that fails, in plain JAX, and this project's own code beside it."""
