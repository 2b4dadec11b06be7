"""What LLQR needs to know of a training loop: when to refit, on which inputs, with which loss, and how it went."""
