"""The compiled update: loss and gradients, loss scale, rounding, router bias and trainable parameters."""
