"""The train step that updates each layer during the backward pass, so that only one layer's gradients exist at a time."""
