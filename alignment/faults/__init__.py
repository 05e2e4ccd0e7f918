"""Deliberate faults, wrapped around seams of the product from outside; no product code path knows about them."""
