"""`llqr report`: runs as one page that needs nothing else."""
