"""Figures, drawn to files (never to a screen) in one style."""
