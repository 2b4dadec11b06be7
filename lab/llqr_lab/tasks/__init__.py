"""Tasks: what is trained on what, how it is scored, and when it is over."""
