"""What computes a `StepPlan`: the arrays of the batch, the forward pass, sampling. The engine knows only the seam."""
