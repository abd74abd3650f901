"""What clients and controllers do with sweeps in a store: messages, lease, ledger, quotas, drain, progress."""
