"""The planner, in two packages: `graph` (jobs and keys) and `estimate` (how long, how much, at what cost)."""
