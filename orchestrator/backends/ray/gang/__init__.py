"""Attempts with many workers: Ray Train starts them, a mailbox receives their reports, hangs are found here."""
