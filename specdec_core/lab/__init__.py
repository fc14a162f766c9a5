"""What notebooks and the command line need, and the loop must never import: lineage, parameters, measurement."""
