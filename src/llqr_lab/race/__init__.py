"""Optimizers side by side: the same networks, batches and seeds, until the training loss reaches a target."""
