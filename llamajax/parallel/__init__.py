"""The devices: their mesh, the sharding of arrays on it, the gathering of weights, and the start of a run's processes."""
