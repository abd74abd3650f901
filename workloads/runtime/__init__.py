"""What every part of the data plane runs on: ranks, precision, random streams, how artifacts are written."""
