"""The quadratic model of a step: the engine that records a network, its rules, chunks of a batch, and precision."""
