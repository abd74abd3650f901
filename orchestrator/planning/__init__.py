"""From a plan and a store to answers: what a submit would run and reuse, how long it takes, what it costs, and why."""
