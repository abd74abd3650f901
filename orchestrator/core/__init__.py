"""What both planes share: the contract of a job, errors, ids, units, canonical JSON, redaction of secrets."""
