"""Attempts of many workers: Ray Train starts them, a mailbox in the runner hears them, hangs are found here."""
