"""The journal's model: events, job states, the fold, snapshots, the failure policy. Pure: no I/O, no clock."""
