"""From committed records to an answer: statistics, tables, curves and their renderings."""
