"""The pure core: events, states, the fold of a journal, the failure policy and the scheduler."""
