"""Float64 formulas the checks judge by, written from their papers and from nothing of the product but its configuration."""
