"""Several ranks that train one model: who holds which block of U, what is sent when, and how they fail together."""
