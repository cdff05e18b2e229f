"""The compiled update: loss and gradients, loss scale, rounding, schedule, router bias and trainable parameters."""
