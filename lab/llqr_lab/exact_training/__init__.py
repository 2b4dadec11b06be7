"""`llqr bench exact-training`: small networks fitted to high accuracy by exact steps, beside Adam, L-BFGS and SOAP."""
