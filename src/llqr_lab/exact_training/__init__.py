"""`llqr exact`: exact second-order steps next to gradient descent."""
