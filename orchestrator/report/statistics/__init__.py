"""The statistics of a report, pure: means and intervals over seeds, paired tests, corrections for many of them."""
