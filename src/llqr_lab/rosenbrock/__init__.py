"""The Rosenbrock function, where every approximate step can be held against the exact one."""
