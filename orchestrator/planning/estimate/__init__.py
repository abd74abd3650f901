"""How long jobs take, what they cost and how sure the answer will be. Pure: no I/O, no clock."""
