"""Bisect a regression across the versions of a whole software stack: an answer with proof, or an honest range."""
