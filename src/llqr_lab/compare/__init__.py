"""`llqr compare`: what optimizers would do at several moments of a training, held against the exact step."""
