"""What a run computes, written down while it runs: every module's inputs, outputs and gradients, and the pipeline's fields."""
