"""What things cost: interleaved variants, several repeats, medians and spread, as a table and JSON."""
