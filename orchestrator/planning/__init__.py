"""The planner, in two packages: `graph` (which jobs, which keys) and `estimate` (how long, how much, at what cost)."""
