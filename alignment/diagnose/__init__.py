"""Where two computations part: comparison of captures and runs, the first divergence, replay of single modules."""
