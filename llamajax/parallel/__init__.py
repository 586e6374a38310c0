"""The devices: their mesh, how arrays lie on it, how weights are gathered, and what processes say to each other."""
