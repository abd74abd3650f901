"""From the text of sweep.yaml to one tree of values with places: includes, variables, merging, overrides."""
