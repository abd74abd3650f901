"""The planner: a spec becomes a graph of content-addressed jobs. Pure: no I/O, no clock."""
